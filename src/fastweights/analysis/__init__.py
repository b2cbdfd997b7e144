"""Mixers and models as dynamical systems and as attention maps, and the papers' theory as programs."""
