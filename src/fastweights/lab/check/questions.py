"""What a law asks: each function gives by how much the two sides of its law differ on an example,
which is the largest difference over the largest number of the other side.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastweights.lab.check.subject import NotTaken, Subject
from fastweights.models.cache_names import CACHES
from fastweights.models.continuation import apart
from fastweights.models.invariant import batch_invariant
from fastweights.training.data.formats import document_of
from fastweights.training.data.packing import encode_documents, framing_of_stream, gather

NEW = 6
"""Tokens that are generated."""
ROUNDING = 1e-6
"""Of Trainer, which sums in float32 whatever the model is."""
_WORDS = ("Hedge", "Igloo", "Jacket", "Camel", "Lamp", "Moon", "Fog", "Oven", "Peach", "Quilt")
# none is a part of another, nor of what templates write

STEPS = (1e-4, 1e-3)
"""Of all weights together, for differences: short for kinks, long for what computes in float32."""


@dataclass(frozen=True)
class Example:
    """Something small to try a law on.

    Attributes:
        lengths: of the sequences, documents or messages
        at: the token at which something happens, if anything does
        unit: what lengths are counted in
    """

    lengths: tuple[int, ...]
    at: int | None = None
    unit: str = "tokens"

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def __str__(self) -> str:
        count = " and ".join(map(str, self.lengths))
        where = "" if self.at is None else f", at token {self.at}"
        return f"{count} {self.unit}{where}"


def _worst(differences: Iterator[float]) -> float:
    """The largest; NaN if one is."""
    return float(torch.tensor([*differences], dtype=torch.float64).max())


def see_no_future(subject: Subject, example: Example) -> float:
    ids, at = subject.tokens(1, *example.lengths), _at(example)
    changed = torch.cat([ids[:, :at], subject.other(ids[:, at:])], dim=1)
    return apart(subject.logits(changed)[:, :at], subject.logits(ids)[:, :at])


def continue_from_cache(subject: Subject, example: Example) -> float:
    ids = subject.tokens(1, *example.lengths)
    return apart(subject.continued(ids, (_at(example),)), subject.logits(ids))


def decode_from_cache(subject: Subject, example: Example) -> float:
    ids = subject.tokens(1, *example.lengths)
    cuts = tuple(range(_at(example), ids.shape[1]))
    return apart(subject.continued(ids, cuts), subject.logits(ids))


def prefill_in_chunks(subject: Subject, example: Example) -> float:
    ids = subject.tokens(1, *example.lengths)
    cuts = tuple(range(_at(example), ids.shape[1], _at(example)))
    return apart(subject.continued(ids, cuts), subject.logits(ids))


def keep_rows_apart(subject: Subject, example: Example) -> float:
    ids = subject.tokens(3, *example.lengths)
    together = subject.logits(ids)
    return _worst(apart(together[i : i + 1], subject.logits(ids[i : i + 1])) for i in range(3))


def ignore_padding(subject: Subject, example: Example, left: bool) -> float:
    subject.require("attention_mask")
    rows, ids, mask = _pad(subject, example, left)
    found = subject.logits(ids, attention_mask=mask, **_positions(subject, mask))
    return _worst(
        apart(found[i][mask[i].bool()], subject.logits(row)[0]) for i, row in enumerate(rows)
    )


def keep_bits(subject: Subject, example: Example) -> float:
    subject.require("attention_mask")
    if subject.arguments.isdisjoint(CACHES):
        raise NotTaken(f"its forward takes no {' or '.join(CACHES)}")
    rows, ids, mask = _pad(subject, example, left=True)
    with batch_invariant(subject.model):
        found = subject.logits(ids, attention_mask=mask, **_positions(subject, mask))
        return _worst(
            apart(found[i][mask[i].bool()], read[0])
            for i, row in enumerate(rows)
            for read in (subject.logits(row), subject.continued(row, (row.shape[1] // 2,)))
        )


def learn_from_padded(subject: Subject, example: Example) -> float:
    subject.require("attention_mask")
    rows, ids, mask = _pad(subject, example, left=False)
    given: dict[str, Any] = {"attention_mask": mask, **_positions(subject, mask)}
    found = subject.gradients(ids, mask[..., None].to(torch.float32), **given)
    return _apart_gradients(found, _sum([subject.gradients(row) for row in rows]))


def learn_in_pieces(subject: Subject, example: Example) -> float:
    ids = subject.tokens(2, *example.lengths)
    found = subject.gradients(ids, cuts=(_at(example),))
    return _apart_gradients(found, subject.gradients(ids))


def generate_padded(subject: Subject, example: Example) -> float:
    rows, ids, mask = _pad(subject, example, left=True)
    found = subject.generate(ids, NEW, attention_mask=mask)
    return _worst(
        _apart_in_generation(found, i, subject.generate(row, NEW), 0) for i, row in enumerate(rows)
    )


def generate_with_cache(subject: Subject, example: Example) -> float:
    ids = subject.tokens(2, *example.lengths)
    found, expected = (subject.generate(ids, NEW, use_cache=cached) for cached in (True, False))
    return _worst(_apart_in_generation(found, i, expected, i) for i in range(2))


def search_with_cache(subject: Subject, example: Example) -> float:
    ids = subject.tokens(2, *example.lengths)
    found, expected = (
        subject.generate(ids, NEW, use_cache=cached, num_beams=3) for cached in (True, False)
    )
    return apart(found.sequences_scores, expected.sequences_scores)


def _apart_in_generation(found: Any, row: int, expected: Any, other: int) -> float:
    """Of the logits up to the first token that differs: later ones answer different questions."""

    def differences() -> Iterator[float]:
        for ours, theirs in zip(found.logits, expected.logits, strict=True):
            yield apart(ours[row], theirs[other])
            if ours[row].argmax() != theirs[other].argmax():
                return

    return _worst(differences())


def keep_documents_apart(subject: Subject, example: Example) -> float:
    subject.require("position_ids")
    return _packed(subject, example, {})


def keep_flattened_apart(subject: Subject, example: Example) -> float:
    subject.require("position_ids", "cu_seq_lens_q")
    ends = torch.tensor([0, *example.lengths]).cumsum(0).int().to(subject.device)
    documents = [torch.full((n,), i) for i, n in enumerate(example.lengths)]
    return _packed(
        subject,
        example,
        {
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
            "max_length_q": example.longest,
            "max_length_k": example.longest,
            "seq_idx": torch.cat(documents)[None].int().to(subject.device),
        },
    )


def _packed(subject: Subject, example: Example, given: dict[str, Any]) -> float:
    rows = [subject.tokens(1, n) for n in example.lengths]
    positions = torch.cat([torch.arange(n) for n in example.lengths])[None].to(subject.device)
    found = subject.logits(torch.cat(rows, dim=1), position_ids=positions, **given)
    parts = found.split(example.lengths, dim=1)
    return _worst(apart(part, subject.logits(row)) for part, row in zip(parts, rows, strict=True))


def pack_chats(subject: Subject, example: Example) -> float:
    """The share of words that are learnt though they ask, or that are not though they answer, of
    two equal conversations; infinity where a token differs.
    """
    tokenizer = subject.tokenizer
    if tokenizer is None or tokenizer.chat_template is None:
        raise NotTaken("it has no tokenizer with a chat template")
    words = iter(_WORDS)
    texts = [[next(words) for _ in range(length)] for length in example.lengths]
    roles = ("user", "assistant") * len(texts)
    messages = [{"role": r, "content": " ".join(t)} for r, t in zip(roles, texts, strict=False)]
    framing = framing_of_stream(tokenizer)
    pieces = document_of({"messages": messages}, "the example", tokenizer)
    parts = encode_documents(tokenizer, [iter(pieces), iter(pieces)], framing)
    packed, _ = gather(parts, framing)
    expected = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    if packed.tokens.tolist() != [*expected, *expected]:
        return float("inf")
    learnt, given = (
        str(tokenizer.decode(packed.tokens[chosen]))
        for chosen in (packed.response, ~packed.response)
    )
    wrong = [word in learnt for text in texts[::2] for word in text]
    wrong += [word not in learnt or word in given for text in texts[1::2] for word in text]
    return sum(wrong) / len(wrong)


def come_back_from_disk(subject: Subject, example: Example) -> float:
    """Infinity where a weight differs: logits may, in their last bits, as tensors that begin at
    other addresses are multiplied in another order.
    """
    ids = subject.tokens(1, *example.lengths)
    with tempfile.TemporaryDirectory() as folder:
        subject.model.save_pretrained(folder)
        loaded = type(subject.model).from_pretrained(folder, dtype=subject.model.dtype)
    loaded = loaded.to(subject.device).eval()
    stored, expected = loaded.state_dict(), subject.model.state_dict()
    if not all(torch.equal(stored[name], weight) for name, weight in expected.items()):
        return float("inf")
    return apart(Subject(loaded).logits(ids), subject.logits(ids))


def repeat_logits(subject: Subject, example: Example) -> float:
    ids = subject.tokens(2, *example.lengths)
    return apart(subject.logits(ids), subject.logits(ids))


def repeat_gradients(subject: Subject, example: Example) -> float:
    ids = subject.tokens(2, *example.lengths)
    found, again = subject.gradients(ids), subject.gradients(ids)
    return _apart_gradients(again, found)


def differentiate_twice(subject: Subject, example: Example) -> float:
    """In float64, beside differences of gradients."""
    exact = Subject(copy.deepcopy(subject.model).double())
    ids, direction = subject.tokens(2, *example.lengths), exact.direction()
    try:
        found = exact.curvature(ids, direction)
    except RuntimeError as error:
        if "derivative" in str(error) or "differentiate" in str(error):  # torch's own refusals
            raise NotImplementedError(str(error)) from error
        raise
    expected = (_differences(exact, ids, direction, step) for step in STEPS)
    return min(_apart_gradients(found, one) for one in expected)


def _differences(
    subject: Subject, ids: Tensor, direction: dict[str, Tensor], step: float
) -> dict[str, Tensor]:
    """The derivative of the gradients along a direction, by central differences of fourth order."""
    terms, at = [], 0.0
    for place, share in ((1, 8), (-1, -8), (2, -1), (-2, 1)):
        subject.move(direction, place * step - at)
        at = place * step
        found = subject.gradients(ids)
        terms.append({name: g * (share / (12 * step)) for name, g in found.items()})
    subject.move(direction, -at)
    return _sum(terms)


def smooth_labels(subject: Subject, example: Example) -> float:
    """Of (1 - e) · -log p(next token) + e · mean -log p, in the mean over tokens."""
    ids, factor = subject.tokens(2, *example.lengths), 0.1
    log_p = subject.logits(ids)[:, :-1].log_softmax(-1)
    right = log_p.gather(-1, ids[:, 1:, None]).mean()
    expected = -(1 - factor) * right - factor * log_p.mean()
    found = apart(subject.trainer_loss(ids, label_smoothing_factor=factor), expected)
    return found if found > ROUNDING else 0.0


def shift_positions(subject: Subject, example: Example) -> float:
    subject.require("position_ids")
    ids = subject.tokens(1, *example.lengths)
    positions = torch.arange(ids.shape[1], device=ids.device)[None]
    found, expected = (subject.logits(ids, position_ids=positions + by) for by in (_at(example), 0))
    return apart(found, expected)


def round_to_bfloat16(subject: Subject, example: Example) -> float:
    ids = subject.tokens(1, *example.lengths)
    rounded = copy.deepcopy(subject.model).to(torch.bfloat16)
    return apart(Subject(rounded).logits(ids), subject.logits(ids))


def agree_with_cpu(subject: Subject, example: Example) -> float:
    if subject.device.type == "cpu":
        raise NotTaken("it is on the CPU")
    ids = subject.tokens(1, *example.lengths)
    there = Subject(copy.deepcopy(subject.model).to("cpu"))
    return apart(subject.logits(ids).cpu(), there.logits(ids.cpu()))


def stay_finite(subject: Subject, example: Example) -> float:
    """0, or NaN."""
    last = subject.model.config.get_text_config().vocab_size - 1
    same = [torch.full((1, *example.lengths), n, device=subject.device) for n in (0, last)]
    return _worst(_finite(subject, ids) for ids in same)


def _finite(subject: Subject, ids: Tensor) -> float:
    return _worst(apart(x, x) for x in (subject.logits(ids), *subject.gradients(ids).values()))


def _sum(several: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    names = {name for one in several for name in one}
    return {
        name: torch.stack([one[name] for one in several if name in one]).sum(0) for name in names
    }


def _apart_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Over the largest of all; a parameter without a gradient has a gradient of 0."""
    names = sorted(found.keys() | expected.keys())
    sides = [
        torch.cat([(side[n] if n in side else 0 * other[n]).flatten().double() for n in names])
        for side, other in ((found, expected), (expected, found))
    ]
    return apart(*sides)


def _at(example: Example) -> int:
    if example.at is None:
        raise ValueError(f"{example} says no token")
    return example.at


def _pad(subject: Subject, example: Example, left: bool) -> tuple[list[Tensor], Tensor, Tensor]:
    """Rows ``[1 t]`` of different lengths, all of them ``[b t]``, and their mask ``[b t]``."""
    rows = [subject.tokens(1, n) for n in example.lengths]
    ids = torch.zeros(len(rows), example.longest, dtype=torch.long, device=subject.device)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        n = row.shape[1]
        place = slice(ids.shape[1] - n, None) if left else slice(n)
        ids[i, place], mask[i, place] = row[0], 1
    return rows, ids, mask


def _positions(subject: Subject, mask: Tensor) -> dict[str, Tensor]:
    """As `generate` has them, for a model that takes them."""
    if "position_ids" not in subject.arguments:
        return {}
    return {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
