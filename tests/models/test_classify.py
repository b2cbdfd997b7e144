"""Mixers that read both ways, and the classifiers of sequences, pairs and images."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
    pipeline,
)

from fastweights import (
    MIXERS,
    Bidirectional,
    FastWeightsConfig,
    FastWeightsForCausalLM,
    FastWeightsForImageClassification,
    FastWeightsForSequenceClassification,
    FastWeightsForSequencePairClassification,
    FastWeightsForTokenClassification,
    FastWeightsModel,
    FastWeightsVisionConfig,
)
from fastweights.mixers import make
from fastweights.train import Bytes
from kinds import slow_but
from tiny import tiny_config, tokens
from tolerances import array, assert_close
from transformers_log import transformers_warnings

every_mixer = pytest.mark.parametrize("name", sorted(MIXERS))
POOLINGS = ("mean", "first", "last")


# both ways ----------------------------------------------------------------------------------------


def both_ways(name: str) -> tuple[Bidirectional, Tensor]:
    torch.manual_seed(0)
    return Bidirectional(make(name, d=16)).double(), torch.randn(2, 11, 16, dtype=torch.float64)


@pytest.mark.sampled
@every_mixer
def test_bidirectional_is_the_sum_of_two_readings(name: str) -> None:
    both, x = both_ways(name)
    y, state = both(x)
    assert state is None
    for row in range(2):
        ahead, _ = both.mixer(x[row : row + 1])
        back, _ = both.mixer(torch.from_numpy(array(x)[row : row + 1, ::-1].copy()))
        assert_close(y[row], array(ahead)[0] + array(back)[0, ::-1], name)


@pytest.mark.sampled
@every_mixer
def test_bidirectional_padding_leaves_no_trace(name: str) -> None:
    both, x = both_ways(name)
    keep = torch.ones(2, 11, dtype=torch.bool)
    keep[0, :3] = keep[0, 9:] = keep[1, 5] = False
    y, _ = both(x, keep=keep)
    for row in range(2):
        alone, _ = both(x[row : row + 1, keep[row]])
        assert_close(y[row, keep[row]], array(alone[0]), name)


@pytest.mark.sampled
@every_mixer
def test_bidirectional_documents_do_not_meet(name: str) -> None:
    both, x = both_ways(name)
    y, _ = both(x, segments=torch.tensor([[4] * 6 + [1] * 5] * 2))
    assert_close(
        y, np.concatenate([array(both(x[:, :6])[0]), array(both(x[:, 6:])[0])], axis=1), name
    )


def test_what_reads_both_ways_cannot_go_on() -> None:
    both, x = both_ways("metala")
    _, state = both.mixer(x)
    with pytest.raises(ValueError, match=r"Bidirectional\(MetaLA\) reads sequences as a whole"):
        both(x, state)
    config = tiny_config(bidirectional=True)
    with pytest.raises(ValueError, match="must not see the tokens"):
        FastWeightsForCausalLM(config)
    model = FastWeightsModel(config).eval()
    assert model(tokens(1, 4)).past_key_values is None
    with pytest.raises(ValueError, match="cannot go on"):
        model(tokens(1, 4), use_cache=True)


# every classifier × every property ----------------------------------------------------------------


def image_config(**fields: Any) -> FastWeightsVisionConfig:
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "image_size": 8,
        "patch_size": 4,
        "num_channels": 2,
    }
    return FastWeightsVisionConfig(**{**sizes, "num_labels": 3, **fields})


def text_config(**fields: Any) -> FastWeightsConfig:
    return tiny_config(**{"layers": "hybrid", "num_labels": 3, "bidirectional": True, **fields})


def images(count: int) -> Tensor:
    return torch.randn(count, 2, 8, 8, generator=torch.Generator().manual_seed(0))


CLASSIFIERS: dict[str, tuple[Callable[..., PreTrainedModel], Callable[[int], Tensor]]] = {
    "sequence": (
        lambda **f: FastWeightsForSequenceClassification(text_config(**f)),
        lambda n: tokens(n, 7),
    ),
    "pair": (
        lambda **f: FastWeightsForSequencePairClassification(text_config(**f)),
        lambda n: tokens(n, 2, 7),
    ),
    "image": (lambda **f: FastWeightsForImageClassification(image_config(**f)), images),
    "class token": (
        lambda **f: FastWeightsForImageClassification(
            image_config(**{"class_token": True, "pooling": "last", "learnt_positions": 5, **f})
        ),
        images,
    ),
}
every_classifier = pytest.mark.parametrize("kind", CLASSIFIERS)


def classifier(kind: str, **fields: Any) -> tuple[PreTrainedModel, Tensor]:
    torch.manual_seed(0)
    build, inputs = CLASSIFIERS[kind]
    return build(**fields).eval(), inputs(4)


@every_classifier
def test_saves_and_loads(kind: str, tmp_path: Path) -> None:
    model, x = classifier(kind)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert loaded.config.to_diff_dict() == model.config.to_diff_dict()
    assert torch.equal(loaded(x).logits, model(x).logits)
    assert type(AutoConfig.from_pretrained(tmp_path)) is type(model.config)


@every_classifier
@pytest.mark.parametrize("pooling", POOLINGS)
def test_labels_give_the_cross_entropy_and_every_parameter_a_gradient(
    kind: str, pooling: str
) -> None:
    model, x = classifier(kind, pooling=pooling)
    labels = torch.tensor([0, 2, 1, 1])
    output = model.double()(x if kind in ("sequence", "pair") else x.double(), labels=labels)
    assert output.logits.shape == (4, 3)
    z = array(output.logits)
    expected = np.array(
        [np.log(np.exp(row).sum()) - row[label] for row, label in zip(z, labels, strict=True)]
    )
    assert_close(output.loss, np.asarray(expected.mean()), kind)
    output.loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@every_classifier
def test_mixed_precision_keeps_the_stream_and_the_loss_in_full(kind: str) -> None:
    model, x = classifier(kind)
    full = model(x).logits
    with torch.autocast("cpu", torch.bfloat16):
        halved = model(x, labels=torch.tensor([0, 1, 2, 0]))
    assert halved.loss.dtype == torch.float32
    assert_close(halved.logits.float(), array(full), kind, dtype=torch.bfloat16)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("bidirectional", [True, False])
def test_padding_leaves_no_trace(pooling: str, bidirectional: bool) -> None:
    one, _ = classifier(
        "sequence", pooling=pooling, bidirectional=bidirectional, learnt_positions=9
    )
    two, _ = classifier("pair", pooling=pooling, bidirectional=bidirectional, learnt_positions=9)
    ids, other = tokens(1, 5), tokens(1, 3, seed=1)
    for model in (one.double(), two.double()):
        pairs = isinstance(model, FastWeightsForSequencePairClassification)
        alone = model(torch.stack([ids, ids], 1) if pairs else ids).logits
        for left in range(4):
            padded = F.pad(ids, (left, 3 - left), value=7)
            mask = F.pad(torch.ones_like(ids), (left, 3 - left))
            padded, mask = (torch.stack([x, x], 1) if pairs else x for x in (padded, mask))
            assert_close(
                model(padded, attention_mask=mask).logits,
                array(alone),
                f"{left} tokens of padding before",
            )
    pair = torch.stack([ids, F.pad(other, (0, 2), value=9)], 1)
    mask = torch.stack([torch.ones_like(ids), F.pad(torch.ones_like(other), (0, 2))], 1)
    vectors = [pooled_by_hand(two.model(x).last_hidden_state[0], pooling) for x in (ids, other)]
    features = torch.cat([vectors[0], vectors[1], vectors[0] * vectors[1], vectors[0] - vectors[1]])
    assert_close(
        two(pair, attention_mask=mask).logits[0],
        array(two.score(features)),
        "a pair of two lengths",
    )


def test_every_token_has_a_class() -> None:
    torch.manual_seed(0)
    model = FastWeightsForTokenClassification(text_config()).double().eval()
    ids = tokens(2, 7)
    labels = torch.tensor([[0, 1, 2, -100, 1, 0, -100], [2, -100, -100, 1, 1, 0, 2]])
    output = model(ids, labels=labels)
    assert output.logits.shape == (2, 7, 3)
    counted = [
        np.log(np.exp(z).sum()) - z[label]
        for z, label in zip(array(output.logits).reshape(14, 3), labels.flatten(), strict=True)
        if label != -100
    ]
    assert_close(output.loss, np.asarray(np.mean(counted)), "tokens", dtype=torch.float32)
    output.loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    padded = F.pad(ids, (2, 1), value=7)
    mask = F.pad(torch.ones_like(ids), (2, 1))
    assert_close(
        model(padded, attention_mask=mask).logits[:, 2:-1], array(output.logits), "padding"
    )


def pooled_by_hand(x: Tensor, pooling: str) -> Tensor:
    return {"mean": x.sum(0) / len(x), "first": x[0], "last": x[-1]}[pooling]


# images -------------------------------------------------------------------------------------------


def test_tokens_are_the_patches_row_by_row_and_the_class_token() -> None:
    model, x = classifier("class token")
    embed = model.model.embed_tokens
    got, weight, pixels = array(embed(x)), array(embed.W.weight), array(x)
    for row in range(2):
        for column in range(2):
            patch = pixels[1, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
            want = weight @ patch.reshape(-1) + array(embed.W.bias)
            assert_close(
                torch.from_numpy(got[1, 2 * row + column]), want, "patch", dtype=torch.float32
            )
    assert np.array_equal(got[:, 4], np.tile(array(embed.class_token), (4, 1)))
    assert model.config.num_tokens == 5


def test_a_causal_image_model_reads_the_class_token_last() -> None:
    model, x = classifier("class token", bidirectional=False)
    changed = x.clone()
    changed[:, :, -1, -1] += 1
    assert not torch.allclose(model(x).logits, model(changed).logits)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"patch_size": 3}, "image_size = 8 is not divisible by patch_size = 3"),
        ({"num_channels": 0}, "num_channels = 0"),
        ({"pooling": "max"}, "pooling = 'max'; there are first, last, mean"),
    ],
)
def test_configurations_that_do_not_fit(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        image_config(**fields)


def test_inputs_that_do_not_fit() -> None:
    model, _ = classifier("image")
    with pytest.raises(ValueError, match=r"\[4, 3, 8, 8\], must be \[batch, 2, 8, 8\]"):
        model(torch.zeros(4, 3, 8, 8))
    with pytest.raises(ValueError, match=r"must be \[batch, 2, time\]"):
        classifier("pair")[0](tokens(2, 5))
    short, x = classifier("class token", learnt_positions=4)
    with pytest.raises(ValueError, match="learnt_positions = 4"):
        short(x)


# as users meet them -------------------------------------------------------------------------------


def test_auto_classes(tmp_path: Path) -> None:
    for kind, auto in (
        ("sequence", AutoModelForSequenceClassification),
        ("image", AutoModelForImageClassification),
    ):
        model, _ = classifier(kind)
        assert type(auto.from_config(model.config)) is type(model)
        model.save_pretrained(tmp_path / kind)
        assert type(auto.from_pretrained(tmp_path / kind)) is type(model)


@pytest.mark.parametrize(
    "auto", [AutoModelForSequenceClassification, AutoModelForTokenClassification]
)
def test_a_language_model_can_be_turned_into_a_classifier(auto: Any, tmp_path: Path) -> None:
    language = FastWeightsForCausalLM(tiny_config())
    language.save_pretrained(tmp_path)
    names = {"id2label": {0: "O", 1: "B-PER", 2: "I-PER"}}
    with transformers_warnings() as said:
        model = auto.from_pretrained(tmp_path, **names)
    assert "score.weight" in said[0]
    assert "newly initialized" in said[0]
    assert model.score.weight.shape == (3, 16)
    assert model.config.id2label[1] == "B-PER"
    assert torch.equal(
        model.model.layers[0].mixer.W_q.weight, language.model.layers[0].mixer.W_q.weight
    )


def test_only_a_whole_head_may_be_missing(tmp_path: Path) -> None:
    model, _ = classifier("sequence")
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for lost in ("score.bias", "model.norm.weight"):
        kept = {name: x for name, x in weights.items() if name != lost}
        save_file(kept, tmp_path / "model.safetensors", {"format": "pt"})
        with pytest.raises(ValueError, match=f"lacks 1 weights .* {lost}"):
            type(model).from_pretrained(tmp_path)


TAGGED = ["O", "B-PER", "I-PER"]


def test_pipelines_name_the_classes(tmp_path: Path) -> None:
    names = dict(enumerate(TAGGED))
    config = tiny_config(vocab_size=300, id2label=names)
    tokenizer = Bytes().build([])
    for task, cls in (
        ("text-classification", FastWeightsForSequenceClassification),
        ("token-classification", FastWeightsForTokenClassification),
    ):
        cls(config).save_pretrained(tmp_path / task)
        tokenizer.save_pretrained(tmp_path / task)
        found = pipeline(task, str(tmp_path / task), **IGNORE.get(task, {}))("sheep")
        assert found
        assert {row.get("label", row.get("entity")) for row in found} <= set(TAGGED)


IGNORE = {"token-classification": {"ignore_labels": []}}
"""Else the pipeline leaves out what has the class O."""


def test_regression_and_several_labels_at_once() -> None:
    model, x = classifier("sequence", num_labels=1)
    values = torch.tensor([0.5, 1.0, -1.0, 2.0])
    error = array(model(x).logits[:, 0] - values)
    assert_close(model(x, labels=values).loss, np.asarray((error**2).mean()), "regression")
    model, x = classifier("sequence")
    hot = torch.tensor([[1.0, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]])
    p = 1 / (1 + np.exp(-array(model(x).logits)))
    said = np.log(np.where(hot.bool(), p, 1 - p))
    assert_close(model(x, labels=hot).loss, np.asarray(-said.mean()), "several labels")


def contains(ids: Tensor) -> Tensor:
    return (ids == 3).any(1).long()


def same_words(ids: Tensor) -> Tensor:
    return (ids[:, 0, 0] == ids[:, 1, 0]).long()


def half_lit(generator: torch.Generator) -> Tensor:
    light = torch.tensor([1.0] * 4 + [-1.0] * 4)
    side = torch.randint(2, (32, 1, 1, 1), generator=generator) * 2 - 1
    return torch.randn(32, 2, 8, 8, generator=generator) + side * light


def brighter_half(x: Tensor) -> Tensor:
    return (x[..., :4].mean((1, 2, 3)) > x[..., 4:].mean((1, 2, 3))).long()


TASKS: dict[str, tuple[Callable[[torch.Generator], Tensor], Callable[[Tensor], Tensor]]] = {
    "sequence": (lambda g: torch.randint(1, 9, (32, 6), generator=g), contains),
    "pair": (lambda g: torch.randint(1, 4, (32, 2, 1), generator=g).expand(-1, -1, 5), same_words),
    "class token": (half_lit, brighter_half),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", slow_but(TASKS, ("sequence",)))
def test_learns_an_easy_task(kind: str) -> None:
    draw, label = TASKS[kind]
    model, _ = classifier(kind, num_labels=2)
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        x = draw(generator)
        optimizer.zero_grad()
        model(x, labels=label(x)).loss.backward()
        optimizer.step()
    x = torch.cat([draw(generator) for _ in range(8)])
    assert (model.eval()(x).logits.argmax(1) == label(x)).double().mean() > 0.9
