"""timm beside a torch built for CPUs alone, by which torchvision's own library does not load."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

DECLARED: list[torch.library.Library] = []


def require_timm() -> None:
    """Skip the test that asks for timm where it is not installed."""
    pytest.importorskip("torchvision", reason="torchvision, which timm needs, is not installed")
    pytest.importorskip("timm", reason="fastweights[images] is not installed")


def declare_operators() -> None:
    """Declare the operators of which torchvision registers fake kernels, if its library, which
    defines them, does not load: images are transformed without them. Called before transformers is
    imported, which imports torchvision."""
    try:
        import_module("torchvision")
    except ImportError:
        return
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        DECLARED.append(library)


declare_operators()
