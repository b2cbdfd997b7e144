"""Whole models by the kernels of a GPU: training, also under torch.compile."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fastweights import MIXERS
from fastweights.kernels import TABLE, register
from fastweights.linearize import LinearAttentionConfig
from poison import poisoned_memory
from pretrained import VOCABULARY, linear_llama
from tiny import LAYERS, tiny, tokens
from triton_checks import check_training, training

pytestmark = pytest.mark.sampled

WITHOUT = ("softmax", "swa")
"""Mixers whose rule is torch's own attention, on a GPU too."""
ONE_OF_EACH_RULE = (*("gla", "s5", "rglru", "mlstm", "mesanet", "lolcats", "hybrid"),)
"""Mixers that between them take every rule's kernels; of others, scans of many channels with wide
states (dss, s4d, mamba) take the interpreter minutes."""
MODELS = [
    pytest.param(name, marks=() if name in ONE_OF_EACH_RULE else pytest.mark.slow)
    for name in (*MIXERS, "hybrid")
]


@pytest.fixture
def taken() -> Iterator[list[str]]:
    """The names of the kernels that computed something; those of the CPU are away."""
    names = list[str]()
    known = list(TABLE)
    TABLE.clear()
    for kernel in reversed([k for k in known if k.devices != ("cpu",)]):
        register(replace(kernel, compute=_noted(kernel, names)))
    with poisoned_memory():
        yield names
    TABLE.clear()
    for kernel in reversed(known):
        register(kernel)


def _noted(kernel: Any, names: list[str]) -> Any:
    def compute(*arguments: Any) -> Any:
        names.append(kernel.name)
        return kernel.compute(*arguments)

    return compute


@pytest.mark.parametrize("name", MODELS)
def test_training_is_that_of_float64(name: str, taken: list[str]) -> None:
    ids, layers = tokens(1, 40), len(LAYERS[name])
    wanted = training(tiny(name, num_hidden_layers=layers), ids)
    taken.clear()
    single = tiny(name, torch.float32, num_hidden_layers=layers)
    check_training(training(single, ids), wanted)
    assert name in WITHOUT or any("(Triton)" in kernel for kernel in taken)


@pytest.mark.parametrize("window", [0, 4, 100])
def test_linearized_models(window: int, taken: list[str]) -> None:
    ids = torch.randint(1, VOCABULARY, (2, 30), generator=torch.Generator().manual_seed(0))
    analog = LinearAttentionConfig(window=window)
    wanted = training(linear_llama(analog), ids)
    taken.clear()
    check_training(training(linear_llama(analog, dtype=torch.float32), ids), wanted)
    assert any("(Triton)" in kernel for kernel in taken)


@pytest.mark.slow
@pytest.mark.parametrize("speed", ["not slow", "slow"])
def test_compiled_models_agree(speed: str) -> None:
    """In a process without the type checker, which torch.compile cannot trace."""
    tests = Path(__file__).with_name("compiled_models.py")
    options = ["--noconftest", "--show-capture=no", "-m", speed]
    command = [sys.executable, "-m", "pytest", *options, str(tests)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
