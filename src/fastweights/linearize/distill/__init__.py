"""Training and evaluation of a converted model."""
