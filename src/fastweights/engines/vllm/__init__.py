"""vLLM with our language models in it: states as its cache of mamba layers."""
