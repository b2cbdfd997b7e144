"""Training and measuring a converted model."""
