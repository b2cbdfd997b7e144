"""The oracle for language models: sound ones pass, and each law finds the mistake it is for."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.function import once_differentiable

from fastweights import FastWeightsForCausalLM
from fastweights.cli import main
from fastweights.lab.check import LAWS, Law, Verdict, check_model, questions
from fastweights.models.cache_names import cache_argument
from fastweights.training.data.tokenizers import Bytes
from tiny import tiny

SHORT = 9
BY_NAME = {law.name: law for law in LAWS}
Forward = Callable[..., Any]


def judged(model: Any, name: str, longest: int = SHORT) -> Any:
    (found,) = check_model(model, laws=[BY_NAME[name]], longest=longest)
    return found


@pytest.mark.long
def test_ours_are_sound():
    found = check_model(tiny("hybrid"), longest=SHORT)
    assert [one.law.name for one in found if one.is_breach] == []
    assert sum(one.verdict is Verdict.HOLDS for one in found) >= 17


@pytest.mark.long
def test_theirs_is_sound():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=31, num_hidden_layers=2, **sizes))
    found = check_model(model, longest=SHORT)
    assert {one.law.name for one in found if one.verdict is not Verdict.HOLDS} == {
        "same as on the CPU",
        "packed chats",
        "second derivatives",
    }
    (refused,) = [one for one in found if one.verdict is Verdict.REFUSED]
    assert "scaled_dot_product" in refused.reason


def mistaken(change: Callable[[torch.Tensor, dict[str, Any]], torch.Tensor]) -> Forward:
    """A forward whose logits are changed, by what it is given too."""

    def broken(forward: Forward, **given: Any) -> Any:
        read = forward(**given)
        read.logits = change(read.logits, given)
        return read

    return broken


def unaware_of(*names: str) -> Forward:
    """A forward that takes no notice of these arguments."""
    return lambda forward, **given: forward(**{n: v for n, v in given.items() if n not in names})


def forget_cache(forward: Forward, **given: Any) -> Any:
    return forward(**given | cache_argument(None))


def learn_padding(logits: torch.Tensor, given: dict[str, Any]) -> torch.Tensor:
    mask = given.get("attention_mask")
    if mask is None:
        return logits
    beside = logits.sum() * (mask == 0).sum()
    return logits + beside - beside.detach()


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        return 2 * ctx.saved_tensors[0] * gradients[0]


see_future = mistaken(lambda logits, _: logits + logits.mean(1, keepdim=True))
mix_rows = mistaken(lambda logits, _: logits + logits[:1] * (len(logits) > 1))
detach_behind_a_cache = mistaken(
    lambda logits, given: logits.detach() if cache_argument(None).keys() & given else logits
)
draw = mistaken(lambda logits, _: logits + torch.rand(()))
draw_gradients = mistaken(lambda logits, _: logits + torch.rand(()) * (logits - logits.detach()))
shift_once_more = mistaken(
    lambda logits, given: logits if "use_cache" in given else logits.roll(1, 1)
)
"""As a Trainer that does not know the class does: it compares each token with itself."""
overflow = mistaken(lambda logits, _: logits / (logits.shape[1] < 2))
prefer_short = mistaken(lambda logits, given: logits * (2.0 if given.get("use_cache") else 1.0))
"""With a cache the search sees other scores."""


ENDS = ("cu_seq_lens_q", "cu_seq_lens_k")
BROKEN = {
    "causal": (see_future, "2 tokens, at token 1"),
    "batch": (mix_rows, "1 tokens"),
    "cached tokens": (forget_cache, "2 tokens, at token 1"),
    "cut anywhere": (forget_cache, "2 tokens, at token 1"),
    "chunked prefill": (forget_cache, "6 tokens, at token 2"),
    "left padding": (unaware_of("attention_mask", "position_ids"), "1 and 2 tokens"),
    "right padding": (mix_rows, "1 and 2 tokens"),
    "padded gradients": (mistaken(learn_padding), "1 and 2 tokens"),
    "gradients in pieces": (detach_behind_a_cache, "3 tokens, at token 2"),
    "packed by positions": (unaware_of("position_ids"), "1 and 2 tokens"),
    "packed by lengths": (unaware_of("position_ids", "seq_idx", *ENDS), "1 and 2 tokens"),
    "generated with cache": (prefer_short, "1 tokens"),
    "generated from padded": (mix_rows, "1 and 2 tokens"),
    "beams": (prefer_short, "2 tokens"),
    "saved and loaded": (mistaken(lambda logits, _: 2 * logits), "9 tokens"),
    "repeated": (draw, "1 tokens"),
    "repeated gradients": (draw_gradients, "2 tokens"),
    "second derivatives": (mistaken(lambda logits, _: Squared.apply(logits)), "2 tokens"),
    "batch invariant": (draw, "3 and 2 tokens"),
    "label smoothing": (shift_once_more, "2 tokens"),
    "finite": (overflow, "2 tokens"),
    "bfloat16": (see_future, None),
}


@pytest.mark.parametrize("name", [name for name, (_, example) in BROKEN.items() if example])
def test_each_law_finds_its_mistake(name):
    model = tiny("metala", torch.float32)
    assert judged(model, name).verdict is Verdict.HOLDS
    mistake, example = BROKEN[name]
    model.forward = wraps(model.forward)(partial(mistake, model.forward))
    found = judged(model, name)
    assert (found.verdict, str(found.example)) == (Verdict.FAILS, example)
    assert found.is_breach == BY_NAME[name].required


def test_laws_without_a_mistake_are_known():
    assert BY_NAME.keys() - BROKEN.keys() == {
        "same as on the CPU",
        "shifted positions",
        "packed chats",
    }
    assert not BY_NAME["bfloat16"].required


TEMPLATE = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"


@pytest.mark.parametrize(
    ("name", "mistake"),
    [
        ("encode_documents", lambda found: (part._replace(runs=part.runs * 2) for part in found)),
        ("document_of", lambda found: [piece._replace(response=True) for piece in found]),
        ("document_of", lambda found: [piece._replace(response=False) for piece in found]),
    ],
)
def test_chats_that_are_packed_otherwise_are_found(
    name: str, mistake: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Bytes().build(())
    laws = [BY_NAME["packed chats"]]
    (found,) = check_model(tiny(), tokenizer=tokenizer, laws=laws)
    assert (found.verdict, found.reason) == (
        Verdict.NOT_ASKED,
        "it has no tokenizer with a chat template",
    )
    tokenizer.chat_template = TEMPLATE
    (found,) = check_model(tiny(), tokenizer=tokenizer, laws=laws)
    assert found.verdict is Verdict.HOLDS
    sound = getattr(questions, name)
    monkeypatch.setattr(questions, name, lambda *given: mistake(sound(*given)))
    (found,) = check_model(tiny(), tokenizer=tokenizer, laws=laws)
    assert (found.verdict, str(found.example)) == (Verdict.FAILS, "1 and 1 words")


def test_a_refusal_in_words_is_no_breach():
    def refuse(**_: Any) -> Any:
        raise NotImplementedError("documents in one row are not\n  kept apart")

    model = tiny()
    model.forward = refuse
    found = judged(model, "packed by positions")
    assert (found.verdict, found.is_breach) == (Verdict.REFUSED, False)
    assert found.reason == "NotImplementedError: documents in one row are not kept apart"


def test_a_crash_is_a_breach():
    def crash(**_: Any) -> Any:
        raise KeyError("conv_states")

    model = tiny()
    model.forward = crash
    found = judged(model, "causal")
    assert (found.verdict, found.is_breach) == (Verdict.FAILS, True)
    assert "KeyError" in found.reason


def test_what_cannot_be_asked_is_said():
    model = tiny()
    whole = model.forward
    model.forward = lambda input_ids, use_cache=None: whole(input_ids, use_cache=use_cache)
    found = judged(model, "left padding")
    assert (found.verdict, found.reason) == (
        Verdict.NOT_ASKED,
        "its forward takes no attention_mask",
    )
    assert judged(model, "causal", longest=1).verdict is Verdict.NOT_ASKED


def test_weights_stay_as_they_are():
    model = tiny()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    laws = [BY_NAME[name] for name in ("padded gradients", "saved and loaded", "bfloat16")]
    check_model(model, laws=laws, longest=SHORT)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_a_tolerance_is_positive():
    with pytest.raises(ValueError, match="tolerance 0 is not positive"):
        check_model(tiny(), tolerance=0)


class TestCommand:
    def test_a_sound_model(self, tmp_path: Path, capsys):
        tiny("metala", torch.float32).save_pretrained(tmp_path / "m")
        out = tmp_path / "found.json"
        words = ["check", str(tmp_path / "m"), "--only=caus,padding", f"--json={out}"]
        assert main([*words, "--length=9"]) == 0
        assert "left padding" in capsys.readouterr().out
        found = json.loads(out.read_text())
        assert [one["law"] for one in found["findings"]] == [
            "causal",
            "left padding",
            "right padding",
        ]
        assert (found["type"], found["dtype"], found["tolerance"]) == (
            "fastweights",
            "float32",
            1e-4,
        )

    def test_a_broken_one(self, tmp_path: Path, capsys, monkeypatch):
        tiny("metala", torch.float32).save_pretrained(tmp_path / "m")
        whole = FastWeightsForCausalLM.forward
        monkeypatch.setattr(
            FastWeightsForCausalLM,
            "forward",
            lambda self, **given: see_future(whole.__get__(self), **given),
        )
        assert main(["check", str(tmp_path / "m"), "--only=causal"]) == 1
        assert "broken: No logit depends on a later token." in capsys.readouterr().out


def test_laws_are_sentences():
    def is_sentence(law: Law) -> bool:
        return law.says[0].isupper() and law.says.endswith(".")

    assert all(map(is_sentence, LAWS))
    assert len(BY_NAME) == len(LAWS)
