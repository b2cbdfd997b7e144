"""Classes of a model of fastweights, imported from the library: pip install fastweights."""

from fastweights.auto import __getattr__ as __getattr__
