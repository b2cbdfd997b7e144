"""A session on a GPU: three stages of checks, timings and decisions, none of which can cost another
its result."""
