"""Other people's training programs with our models in them."""
