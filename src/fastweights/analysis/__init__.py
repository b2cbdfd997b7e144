"""Mixers and models as dynamical systems and as attention maps, and the papers' tables and theory
as programs.
"""
