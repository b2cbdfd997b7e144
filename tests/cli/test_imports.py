"""What is imported when: nothing heavy before it is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

import fastweights

HEAVY = (
    *("torch", "transformers", "numpy", "tokenizers", "safetensors", "huggingface_hub"),
    *("accelerate", "matplotlib", "PIL", "rich", "peft", "datasets", "lm_eval", "jaxtyping"),
)
"""Packages that neither ``import fastweights`` nor the command's help imports."""
ONLY_WHERE_USED = (
    *("accelerate", "matplotlib", "rich", "peft", "datasets", "lm_eval", "PIL", "triton"),
    *("fastweights.lab", "fastweights.cli", "fastweights.train", "fastweights.linearize"),
)
"""What the public names do without (transformers may import some of them for itself)."""


def imported_after(code: str) -> set[str]:
    """The modules that a fresh process has imported after `code`."""
    program = f"{code}\nimport sys\nprint('MODULES', *sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("MODULES")[2].split())


def test_importing_the_package_imports_nothing_heavy() -> None:
    assert not imported_after("import fastweights") & {*HEAVY, *ONLY_WHERE_USED}


@pytest.mark.parametrize("arguments", [["--version"], ["--help"]])
def test_the_command_imports_nothing_heavy_to_tell_of_itself(arguments: list[str]) -> None:
    code = (
        "from fastweights.cli import main\n"
        f"try: main({arguments})\n"
        "except SystemExit as end: assert end.code == 0"
    )
    assert not imported_after(code) & set(HEAVY)


def test_rules_need_torch_alone() -> None:
    assert "transformers" not in imported_after("from fastweights import Decay")


MODEL_TYPES = """
from transformers import AutoConfig, AutoModelForCausalLM
config = AutoConfig.for_model(
    "fastweights", vocab_size=8, hidden_size=8, num_hidden_layers=1
)
assert isinstance(config, fastweights.FastWeightsConfig)
model = AutoModelForCausalLM.from_config(config)
assert isinstance(model, fastweights.FastWeightsForCausalLM)
try: AutoConfig.for_model("linearized_vit")
except ValueError as error: assert "no causal language model" in str(error)
else: raise AssertionError
"""
"""transformers knows ours."""


@pytest.mark.slow
def test_public_names_import_only_what_they_use() -> None:
    names = ", ".join(name for name in fastweights.__all__ if name != "linearize")
    code = (
        "import sys, fastweights, torch\nfrom transformers import PreTrainedModel, pipeline\n"
        "before = set(sys.modules)\n"
        f"from fastweights import {names}\n"
        "assert 'fastweights.mixer' in sys.modules\n"
        f"assert not (set(sys.modules) - before) & {set(ONLY_WHERE_USED)}"
    )
    assert "fastweights.linearize" in imported_after(code + MODEL_TYPES)


def test_every_public_name_is_found() -> None:
    assert all(getattr(fastweights, name, None) is not None for name in fastweights.__all__)
    assert set(fastweights.__all__) <= set(dir(fastweights))
    assert not hasattr(fastweights, "metamorphosis")


@pytest.mark.slow
def test_model_types_are_known_when_those_of_transformers_were_imported_first() -> None:
    code = "import transformers.models.auto.configuration_auto, fastweights"
    assert "fastweights.linearize" in imported_after(code + MODEL_TYPES)
