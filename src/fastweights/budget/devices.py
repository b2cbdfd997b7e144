"""What accelerators offer, by their data sheets."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from fastweights.kernels.triton.chips import CHIPS, Chip


@dataclass(frozen=True)
class Accelerator:
    """A GPU, or the processors of a machine.

    Attributes:
        name: What `find_accelerator` knows it by.
        memory: Bytes; data sheets' GB are decimal here, the drivers report some more.
        bf16: Operations per second of dense products in bfloat16, summed in float32.
        float32: Operations per second of products in float32, without TF32.
        bandwidth: Bytes per second of its memory, read and written together.
        link: Bytes per second that it sends to its neighbours while it receives as many.
        source: Where the figures are from.
        chip: What its kernels are configured for; None for a CPU, whose kernels are those in C.
    """

    name: str
    memory: float
    bf16: float
    float32: float
    bandwidth: float
    link: float
    source: str
    chip: Chip | None

    def peak(self, bf16: bool) -> float:
        """Operations per second of matrix products in the precision of a training."""
        return self.bf16 if bf16 else self.float32


_TABLE = (
    Accelerator(
        "a100",
        *(80e9, 312e12, 19.5e12, 2.039e12, 300e9),
        "NVIDIA A100 data sheet (June 2021), SXM, 80 GB",
        CHIPS[80],
    ),
    Accelerator(
        "a100-40gb",
        *(40e9, 312e12, 19.5e12, 1.555e12, 300e9),
        "NVIDIA A100 data sheet (June 2021), SXM, 40 GB",
        CHIPS[80],
    ),
    Accelerator(
        "rtx4090",
        *(24e9, 165.2e12, 82.6e12, 1.008e12, 32e9),
        "NVIDIA Ada GPU architecture paper, appendix A; PCIe 4.0",
        CHIPS[89],
    ),
    Accelerator(
        "l40s",
        *(48e9, 362e12, 91.6e12, 0.864e12, 32e9),
        "NVIDIA L40S data sheet, without sparsity; PCIe 4.0",
        CHIPS[89],
    ),
    Accelerator(
        "h100",
        *(80e9, 989e12, 67e12, 3.35e12, 450e9),
        "NVIDIA H100 data sheet, SXM, without sparsity",
        CHIPS[90],
    ),
    Accelerator(
        "h200",
        *(141e9, 989e12, 67e12, 4.8e12, 450e9),
        "NVIDIA H200 data sheet, SXM, without sparsity",
        CHIPS[90],
    ),
    Accelerator(
        "b200",
        *(180e9, 2250e12, 75e12, 8e12, 900e9),
        "NVIDIA HGX B200 data sheet, an eighth of it, without sparsity",
        CHIPS[100],
    ),
)
CPU = Accelerator("cpu", 0, 0, 0, 0, 0, "this machine, of which only kernels are asked", None)
"""The processors of a machine: what its kernels keep is known, what it offers is not."""
ACCELERATORS: dict[str, Accelerator] = {one.name: one for one in _TABLE}
"""The accelerators that plans are made for, by name."""


def find_accelerator(name: str) -> Accelerator:
    """Find an accelerator by its name.

    Raises:
        ValueError: If there is none; the message lists all.
    """
    if name not in ACCELERATORS:
        near = get_close_matches(name.lower(), ACCELERATORS, n=1)
        meant = f"did you mean {near[0]}? There are" if near else "there are"
        raise ValueError(f"no device is called {name!r}; {meant} {', '.join(ACCELERATORS)}")
    return ACCELERATORS[name]
