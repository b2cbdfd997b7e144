"""transformers' own linear models, computed by ours: `patch_transformers`."""

from fastweights.engines.transformers.patch import Patch, patch_transformers

__all__ = ["Patch", "patch_transformers"]
