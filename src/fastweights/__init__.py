"""Linear-time sequence models, each defined once."""
