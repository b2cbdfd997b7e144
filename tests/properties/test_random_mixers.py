"""Every mixer with random arguments of its constructor, and configurations of models of them."""

from __future__ import annotations

import json
from inspect import signature
from pathlib import Path
from tempfile import TemporaryDirectory
from types import NoneType
from typing import Annotated, Any, NoReturn, get_args, get_origin

import pytest
import torch
from hypothesis import assume
from hypothesis import strategies as st

from cases import parts
from fastweights import MIXERS, FastWeightsConfig, FastWeightsForCausalLM
from fastweights.layers.arguments import Count, CountOrZero, NonNegative, Positive, _hints
from fastweights.methods import Auto, Chunkwise, Parallel, Recurrent
from fastweights.mixers import make
from laws import law
from tolerances import assert_close

VALUES: dict[Any, st.SearchStrategy[Any]] = {
    Count: st.sampled_from([1, 2, 3, 4, 6, 8, 16]),
    CountOrZero: st.integers(0, 5),
    Positive: st.sampled_from([1e-6, 0.25, 0.5, 1.0, 1.5, 2.0, 16.0]),
    NonNegative: st.sampled_from([0.0, 1e-6, 0.5, 1.0, 2.0]),
    int: st.integers(-1, 8),
    float: st.sampled_from([-1.0, 0.0, 0.1, 0.5, 0.9, 1.0, 2.0]),
    bool: st.booleans(),
    NoneType: st.none(),
}


def values_of(hint: Any) -> st.SearchStrategy[Any] | None:
    """Values of an annotation; None if none are known."""
    if hint in VALUES:
        return VALUES[hint]
    if get_origin(hint) is Annotated:
        return None
    known = [VALUES[kind] for kind in get_args(hint) if kind in VALUES]
    return st.one_of(known) if known else None


def arguments_of(name: str) -> st.SearchStrategy[dict[str, Any]]:
    """Some of the arguments of a mixer's constructor."""
    drawn = {
        argument: values
        for argument, hint in _hints(MIXERS[name].__init__).items()
        if argument in signature(MIXERS[name]).parameters and argument != "d"
        if (values := values_of(hint)) is not None
    }
    return st.fixed_dictionaries({}, optional=drawn)


MIXED = st.sampled_from(sorted(MIXERS)).flatmap(
    lambda name: st.tuples(st.just(name), arguments_of(name))
)
WIDTHS = st.sampled_from([8, 12, 16, 24])
METHODS = st.sampled_from([Auto(), Parallel(), Chunkwise(3), Chunkwise(16)])


def refused(error: ValueError) -> NoReturn:
    """Another example, if the error is a sentence."""
    if len(str(error).split()) < 4:
        raise error
    assume(False)
    raise AssertionError


def built(mixed: tuple[str, dict[str, Any]], d: int) -> Any:
    """A mixer in float64, unless it refuses its arguments in a sentence."""
    torch.manual_seed(0)
    try:
        return make(mixed[0], d, **mixed[1]).double().eval()
    except ValueError as error:
        refused(error)


@pytest.mark.long
@pytest.mark.usefixtures("unchecked")
@law(
    calls=1200,
    few=60,
    mixed=MIXED,
    d=WIDTHS,
    t=st.integers(0, 33),
    method=METHODS,
    cut=st.floats(0, 1),
)
def test_a_mixer_is_made_or_refused_and_then_does_one_thing(
    mixed: tuple[str, dict[str, Any]], d: int, t: int, method: Any, cut: float
) -> None:
    """Its methods agree, and its text may be cut anywhere."""
    mixer = built(mixed, d)
    assume(t <= getattr(mixer, "length", t))
    x = torch.randn(2, t, d, dtype=torch.float64, generator=torch.Generator().manual_seed(t))
    with torch.no_grad():
        want, end = mixer(x, method=Recurrent())
        got, _ = mixer(x, method=method)
        place = round(cut * t)
        first, state = mixer(x[:, :place], method=method)
        second, reached = mixer(x[:, place:], state, method=method)
    assert_close(got, want, "y")
    assert_close(torch.cat([first, second], 1), want, "y in two parts")
    assert [tuple(p.shape) for p in parts(reached.memory)] == [
        tuple(p.shape) for p in parts(end.memory)
    ]


CONFIGS = st.fixed_dictionaries(
    {
        "vocab_size": st.integers(1, 300),
        "hidden_size": WIDTHS,
        "num_hidden_layers": st.integers(1, 4),
        "mixers": st.lists(MIXED, min_size=1, max_size=3).map(
            lambda found: [{"name": name, **arguments} for name, arguments in found]
        ),
    },
    optional={
        "tie_word_embeddings": st.booleans(),
        "logit_cap": st.none() | st.floats(0.5, 50),
        "initializer_range": st.none() | st.floats(0.001, 1),
        "mlp": st.sampled_from(["gated", "plain", "identity", None]),
    },
)


def fields_of(config: FastWeightsConfig) -> dict[str, Any]:
    """All but the version of transformers, which is that of whoever saved it last."""
    content = json.loads(config.to_json_string(use_diff=False))
    return {name: part for name, part in content.items() if name != "transformers_version"}


def configured(fields: dict[str, Any]) -> FastWeightsConfig:
    try:
        return FastWeightsConfig(**fields)
    except ValueError as error:
        refused(error)


@law(calls=500, few=30, fields=CONFIGS)
def test_a_configuration_is_what_was_saved_of_it(fields: dict[str, Any]) -> None:
    config = configured(fields)
    assert FastWeightsConfig.from_dict(config.to_dict()).to_dict() == config.to_dict()
    with TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        again = FastWeightsConfig.from_pretrained(folder)
        again.save_pretrained(Path(folder) / "again")
        texts = [path.read_text() for path in sorted(Path(folder).rglob("config.json"))]
    assert fields_of(again) == fields_of(config)
    assert texts[0] == texts[1]


@law(calls=60, few=4, fields=CONFIGS)
def test_a_model_is_what_was_saved_of_it(fields: dict[str, Any]) -> None:
    config = configured(fields)
    torch.manual_seed(0)
    try:
        model = FastWeightsForCausalLM(config).eval()
    except ValueError as error:
        refused(error)
    ids = torch.arange(7)[None] % config.vocab_size
    with TemporaryDirectory() as folder, torch.no_grad():
        model.save_pretrained(folder)
        again = FastWeightsForCausalLM.from_pretrained(folder).eval()
        want = model(ids).logits
        assert_close(again(ids).logits, want.numpy(), "logits")
    for ours, theirs in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
