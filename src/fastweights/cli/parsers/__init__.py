"""What the verbs accept, as classes of options.

They import nothing of the library's code; what it defines is read from its source.
"""
