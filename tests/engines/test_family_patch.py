"""What a patch touches, leaves and puts back."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from importlib import import_module, reload
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.lfm2 import modeling_lfm2
from transformers.models.mamba import modeling_mamba

from fastweights.engines.transformers import patch_transformers
from fastweights.engines.transformers.packing import MASKS
from transformers_families import build_family

pytestmark = [pytest.mark.sampled, pytest.mark.usefixtures("unchecked")]
MODELS = "transformers.models"
LFM2 = {"lfm2.causal_conv1d_fn", "lfm2.causal_conv1d_update"}
SEEN = (modeling_lfm2, modeling_mamba)


def snapshot() -> list[Any]:
    """All functions of two modelling files and the forwards of their models."""
    classes = (modeling_lfm2.Lfm2Model, modeling_lfm2.Lfm2ForCausalLM, modeling_mamba.MambaModel)
    classes += (nn.Linear,)
    return [dict(vars(module)) for module in SEEN] + [cls.forward for cls in classes]


def is_patched(module: ModuleType) -> bool:
    return "fastweights" in inspect.getfile(module.causal_conv1d_fn.__code__)


@pytest.fixture(autouse=True)
def before() -> Iterator[None]:
    """Every test puts everything back."""
    functions = snapshot()
    assert not any(map(is_patched, SEEN))
    yield
    assert snapshot() == functions


@pytest.fixture
def changed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A modelling file like lfm2's with a line that is another one."""
    old, new = request.param
    source = inspect.getsource(modeling_lfm2)
    assert old in source
    module = ModuleType(f"{MODELS}.lfm2.modeling_changed")
    module.__file__, module.__package__ = modeling_lfm2.__file__, modeling_lfm2.__package__
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(source.replace(old, new), "changed", "exec"), vars(module))
    return module


CONVOLVED = "    _, hidden_size, seq_len = hidden_states.shape\n    padding = "


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (("    padding = weight.shape[-1] - 1", "    padding = weight.shape[-1] - 2"), "something"),
        (
            ("    activation: str | None = None,\n    **", "    activation=None, scale=1, **"),
            "scale",
        ),
        ((CONVOLVED, f"    raise TypeError('gone')\n{CONVOLVED}"), "TypeError: gone"),
    ],
    indirect=["changed"],
)
def test_a_changed_function_is_left_alone_and_said(changed: ModuleType, reason: str) -> None:
    theirs, forward = changed.causal_conv1d_fn, changed.Lfm2Model.forward
    with pytest.warns(UserWarning, match="lfm2.causal_conv1d_fn .* stays as it is") as warned:
        patch = patch_transformers()
    assert {Path(one.filename).name for one in warned} == {Path(__file__).name}
    with patch:
        assert reason in patch.left["lfm2.causal_conv1d_fn"]
        assert changed.causal_conv1d_fn is theirs
        assert changed.Lfm2Model.forward is forward, "documents would not be kept apart"
        assert changed.causal_conv1d_update is not modeling_lfm2.causal_conv1d_update
        assert is_patched(modeling_lfm2)


@pytest.mark.filterwarnings("ignore:lfm2.Lfm2RMSNorm:UserWarning")
@pytest.mark.parametrize(
    "changed", [("variance + self.variance_epsilon", "variance + 1")], indirect=True
)
def test_a_norm_that_stays_decides_nothing_else(changed: ModuleType) -> None:
    forward = changed.Lfm2Model.forward
    with patch_transformers() as patch, patch_transformers() as again:
        assert set(patch.left) == {"lfm2.Lfm2RMSNorm.forward"}
        assert changed.Lfm2Model.forward is not forward
        assert is_patched(changed)
        assert again.replaced == ()
    assert changed.Lfm2Model.forward is forward


def test_again_finds_nothing_to_do() -> None:
    with patch_transformers() as first:
        functions = snapshot()
        second = patch_transformers()
        assert set(first.replaced) > LFM2
        assert second.replaced == ()
        assert snapshot() == functions
        second.undo()
        assert snapshot() == functions
    first.undo()
    assert first.replaced == ()


@pytest.mark.parametrize("order", [(1, 0, 2), (2, 0, 1)])
def test_undone_in_any_order(order: tuple[int, ...]) -> None:
    patches = [patch_transformers("lfm2"), patch_transformers(), patch_transformers("mamba")]
    for_lfm2, for_mamba = {0, 1}, {1, 2}
    for number in order:
        patches[number].undo()
        for_lfm2.discard(number)
        for_mamba.discard(number)
        assert is_patched(modeling_lfm2) == bool(for_lfm2)
        assert is_patched(modeling_mamba) == bool(for_mamba)


def test_only_the_files_of_a_model_or_a_name() -> None:
    model = build_family("lfm2")
    for named in ("lfm2", model):
        with patch_transformers(named) as patch:
            assert {name for name in patch.replaced if "causal_conv" in name} == LFM2
            assert {name.partition(".")[0] for name in patch.replaced} == {"lfm2", "torch"}
            assert set(patch.replaced) > {"lfm2.Lfm2Model.forward", f"lfm2.{MASKS[0]}"}
            assert not is_patched(modeling_mamba)
    with patch_transformers("qwen3_5_text") as patch:
        assert "qwen3_5.torch_chunk_gated_delta_rule" in patch.replaced


def test_a_model_type_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="has no model type 'lfm99'"):
        patch_transformers("lfm99")


def test_neither_a_model_nor_a_name() -> None:
    wrong: Any = 42
    with pytest.raises(TypeError, match=r"the name of a model type .* not 42"):
        patch_transformers(wrong)


def test_files_that_are_imported_later(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"{MODELS}.lfm2_moe.modeling_lfm2_moe"
    monkeypatch.delitem(sys.modules, name, raising=False)
    first, second = patch_transformers(), patch_transformers()
    module = import_module(name)
    assert is_patched(module)
    second.undo()
    assert is_patched(module), "the first patch is for it too"
    assert "lfm2_moe.causal_conv1d_fn" in first.replaced
    assert is_patched(reload(module))
    first.undo()
    assert not is_patched(module)
    assert not is_patched(reload(module))


def test_errors_of_a_file_come_through() -> None:
    with patch_transformers(), pytest.raises(ModuleNotFoundError, match="modeling_absent"):
        import_module(f"{MODELS}.lfm2.modeling_absent")


def test_random_numbers_go_on_as_before() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    with patch_transformers("mamba"):
        assert torch.equal(torch.rand(2), expected)
