"""An oracle for anyone's causal language model: what holds whatever its weights are, tried."""

from fastweights.lab.check.judge import Finding, Verdict, check_model
from fastweights.lab.check.laws import LAWS, Law
from fastweights.lab.check.questions import Example
from fastweights.models.continuation import tolerance_of

__all__ = ["LAWS", "Example", "Finding", "Law", "Verdict", "check_model", "tolerance_of"]
