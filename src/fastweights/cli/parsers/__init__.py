"""What the verbs accept: one file per verb, which imports nothing of the library's code.

Defaults and choices that the code defines are written out here, so that ``--help`` needs no
torch; a test compares them with the code.
"""
