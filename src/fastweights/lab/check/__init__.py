"""An oracle for anyone's causal language model: what holds whatever its weights are, tried."""

from fastweights.lab.check.judge import Finding, Verdict, check_model, tolerance_of
from fastweights.lab.check.laws import LAWS, Law
from fastweights.lab.check.questions import Example

__all__ = ["LAWS", "Example", "Finding", "Law", "Verdict", "check_model", "tolerance_of"]
