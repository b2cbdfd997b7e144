"""What kernels cost that no GPU has run: compiled, and counted by Triton's interpreter."""
