"""Other people's programs with our models in them: they train, or serve."""
