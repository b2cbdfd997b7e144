"""Analysis of mixers and models as dynamical systems and attention maps; the papers' tables and
theory as programs."""
