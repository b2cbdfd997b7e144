"""Models of ours in the formats of transformers: the plans of the importers, read backwards."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from math import isclose
from typing import Any, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    PretrainedConfig,
    PreTrainedModel,
)

from fastweights.importers.plan import ConstantTensor, Convert, ImportPlan, TensorSource
from fastweights.importers.settings import SETTINGS
from fastweights.importers.source import InMemorySource
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM

T = TypeVar("T")
AGREEMENT = 0.02
"""How far a weight that is read back may be from ours, relative to the largest of its tensor: far
below another weight, and above the rounding of any dtype."""
OWN = ("training", "gradient_checkpointing")
"""Attributes of modules that change nothing of what they compute."""


def export_model(model: FastWeightsForCausalLM, family: str | None = None) -> PreTrainedModel:
    """Convert a model of this library into one of transformers that computes the same.

    The family's importer says what each tensor of ours is made of; this is its plan backwards, and
    the result is read again by it before it is returned.

    Args:
        model: A model of this library.
        family: A key of `SETTINGS`, a model_type of transformers; None for the first that has
            such models.

    Raises:
        ValueError: If the family is unknown, has no such models, or cannot hold these weights; the
            message names the difference.
    """
    return _first_family(family, lambda kind: _export(model, kind))


def require_family(config: FastWeightsConfig, family: str | None = None) -> None:
    """Check that `export_model` can state models of this configuration, whatever their weights.

    Raises:
        ValueError: As `export_model` does.
    """
    with torch.device("meta"):
        model = FastWeightsForCausalLM(config)
    _first_family(family, lambda kind: _plan_in(model, kind))


def _first_family(family: str | None, make: Callable[[str], T]) -> T:
    """What `make` makes of the family, or of the first that it does not refuse."""
    if family is not None and family not in SETTINGS:
        raise ValueError(
            f"no model is written as {family!r}; there are {', '.join(sorted(SETTINGS))}"
        )
    reasons: list[str] = []
    for kind in [family] if family else SETTINGS:
        try:
            return make(kind)
        except ValueError as error:
            reasons.append(str(error))
    if family:
        raise ValueError(reasons[0])
    raise ValueError(
        "no family of transformers that is written has such a model; name the one that comes"
        f" nearest to see what differs: {', '.join(sorted(SETTINGS))}"
    )


def _plan_in(model: FastWeightsForCausalLM, kind: str) -> tuple[PreTrainedModel, ImportPlan]:
    """A model of the family without weights, and how ours are made of its weights."""
    config = _config_of(model, kind)
    family: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    with torch.device("meta"):
        blank = family(config)
    plan = _plan_of(InMemorySource(blank), kind)
    _require_same(model, plan.config, kind)
    return blank, plan


def _export(model: FastWeightsForCausalLM, kind: str) -> PreTrainedModel:
    blank, plan = _plan_in(model, kind)
    family: Any = type(blank)
    state = _written(plan, model, {name: t.shape for name, t in blank.state_dict().items()}, kind)
    for name, weight in blank.named_parameters():
        if name not in state:  # the importer ignores it
            state[name] = torch.zeros(weight.shape, dtype=model.lm_head.weight.dtype)
    return family.from_pretrained(
        None, config=blank.config, state_dict=state, dtype=model.lm_head.weight.dtype
    )


def _config_of(model: FastWeightsForCausalLM, kind: str) -> PretrainedConfig:
    try:
        return CONFIG_MAPPING[kind](**SETTINGS[kind](model))
    except (AttributeError, KeyError, TypeError, StrictDataclassError) as error:
        raise ValueError(
            f"this model cannot be written as {kind!r}, whose layers are others: {error}"
        ) from error


def _plan_of(source: InMemorySource, kind: str) -> ImportPlan:
    from fastweights.importers import FAMILIES

    return FAMILIES[kind](source)


def _require_same(model: FastWeightsForCausalLM, config: FastWeightsConfig, kind: str) -> None:
    """Check that a model of `config` would compute what this one does, weights aside."""
    with torch.device("meta"):
        theirs = FastWeightsForCausalLM(config)
    ours, others = dict(_facts(model)), dict(_facts(theirs))
    for name in sorted(ours.keys() | others.keys()):
        if not _is_same(ours.get(name), others.get(name)):
            raise ValueError(
                f"this model cannot be written as {kind!r}: its {name} is"
                f" {ours.get(name, 'not there')}, and {kind} has {others.get(name, 'none')}"
            )


def _is_same(ours: object, theirs: object) -> bool:
    """Whether values are equal, numbers up to the rounding of what they were computed from."""
    if isinstance(ours, float) and isinstance(theirs, float):
        return isclose(ours, theirs, rel_tol=1e-12)
    return ours == theirs


def _facts(model: FastWeightsForCausalLM) -> Iterator[tuple[str, Any]]:
    """What a model computes with, beside its weights, and the shapes of these."""
    config = model.config
    for name in ("input_scale", "logit_cap", "tie_word_embeddings"):
        yield name, getattr(config, name)
    for name, tensor in model.state_dict().items():
        yield f"shape of {name}", tuple(tensor.shape)
    for path, module in model.model.named_modules():
        if path and not path.endswith("dropout"):
            yield f"kind of {path}", type(module).__name__
            for name, value in vars(module).items():
                if not name.startswith("_") and name not in OWN and _is_plain(value):
                    yield f"{name} of {path}", value


def _is_plain(value: object) -> bool:
    return isinstance(value, bool | int | float | str | list | None) or is_dataclass(value)


def _written(
    plan: ImportPlan, model: FastWeightsForCausalLM, shapes: Mapping[str, torch.Size], kind: str
) -> dict[str, Tensor]:
    """Their tensors, of which ours can be read."""
    tied = model.all_tied_weights_keys
    ours = {name: t for name, t in model.state_dict().items() if name not in tied}
    theirs: dict[str, Tensor] = {}
    for name, tensor in ours.items():
        part = plan.tensors[name]
        if isinstance(part, TensorSource):
            for other in part.others:
                theirs[other] = torch.ones(shapes[other], dtype=tensor.dtype)
            if part.source not in theirs:
                theirs[part.source] = torch.zeros(shapes[part.source], dtype=tensor.dtype)
            others = [theirs[other] for other in part.others]
            _write(tensor.cpu(), theirs[part.source], part.convert, others)
    for name, tensor in ours.items():
        _require_readable(name, tensor.cpu(), plan.tensors[name], theirs, kind)
    return theirs


def _write(ours: Tensor, theirs: Tensor, convert: Convert, others: list[Tensor]) -> None:
    """Change `theirs` so that `convert` gives `ours`.

    Where `convert` gives a view of theirs, that is the place; else it is taken for s · x[i] + c of
    single numbers x of theirs, whose s, i and c are found from what it makes of known ones.
    """
    place = convert(theirs, *others)
    if place.untyped_storage().data_ptr() == theirs.untyped_storage().data_ptr():
        place.copy_(ours.view(place.shape))
        return
    wide = [other.double() for other in others]
    known = torch.zeros(theirs.shape, dtype=torch.float64)
    shift = convert(known, *wide)
    scale = convert(known + 1, *wide) - shift
    numbers = torch.arange(known.numel(), dtype=torch.float64).view(theirs.shape)
    index = ((convert(numbers, *wide) - shift) / scale).round().long()
    values = ((ours.double() - shift) / scale).to(theirs.dtype)
    theirs.view(-1)[index.flatten()] = values.flatten()


def _require_readable(
    name: str,
    ours: Tensor,
    part: TensorSource | ConstantTensor,
    theirs: Mapping[str, Tensor],
    kind: str,
) -> None:
    if isinstance(part, ConstantTensor):
        if not (ours == part.value).all():
            raise ValueError(
                f"this model cannot be written as {kind!r}, which has no {name}; ours is not"
                f" {part.value} everywhere"
            )
        return
    read = part.convert(theirs[part.source], *(theirs[other] for other in part.others))
    if not torch.allclose(
        read.double(), ours.double(), rtol=0, atol=AGREEMENT * float(ours.abs().max()) + 1e-30
    ):
        raise ValueError(
            f"this model cannot be written as {kind!r}: its {name} has no counterpart among"
            f" {', '.join(part.sources)}"
        )
