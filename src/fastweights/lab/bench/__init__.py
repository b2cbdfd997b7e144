"""Measuring the library beside its peers and beside what the machine can do."""
