"""What holds of a causal language model whatever its weights are: the laws of `check_model`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from fastweights.lab.check import questions
from fastweights.lab.check.questions import Example
from fastweights.lab.check.subject import Subject


@dataclass(frozen=True)
class Law:
    """One thing that a language model should do.

    Attributes:
        says: the law in a sentence
        examples: from the smallest to the largest
        difference: by how much the model breaks it on an example; NaN where a number is not finite
        allowed: the difference that still obeys it; None for the rounding of the model's type
        required: whether a sound model has to obey; else it is told for information
    """

    name: str
    says: str
    examples: tuple[Example, ...]
    difference: Callable[[Subject, Example], float]
    allowed: float | None = None
    required: bool = True


def _ones(*lengths: int) -> tuple[Example, ...]:
    return tuple(Example((n,)) for n in lengths)


def _cuts(*pairs: tuple[int, int]) -> tuple[Example, ...]:
    return tuple(Example((n,), at) for n, at in pairs)


def _rows(*lengths: tuple[int, ...]) -> tuple[Example, ...]:
    return tuple(Example(some) for some in lengths)


PLACES = _cuts((2, 1), (3, 2), (9, 4), (70, 1), (70, 65), (130, 64))
ROWS = _rows((1, 2), (3, 2), (9, 4, 1), (70, 3), (66, 130))
SHORT_ROWS = _rows((1, 2), (3, 2), (9, 4, 1), (70, 3))
LAWS = (
    Law("causal", "No logit depends on a later token.", PLACES, questions.see_no_future),
    Law(
        "cached tokens",
        "Tokens that are read one by one behind a prompt, from the cache, have the logits of the"
        " whole text at once.",
        _cuts((2, 1), (3, 1), (9, 4), (70, 60), (70, 1)),
        questions.decode_from_cache,
    ),
    Law(
        "cut anywhere",
        "A text that is read in two calls, the second from the cache of the first, has the logits"
        " of the whole text at once.",
        PLACES,
        questions.continue_from_cache,
    ),
    Law(
        "chunked prefill",
        "A text that is read in pieces of equal length, each from the cache before it, has the"
        " logits of the whole text at once.",
        _cuts((6, 2), (9, 4), (70, 16), (130, 48)),
        questions.prefill_in_chunks,
    ),
    Law(
        "batch",
        "A row of a batch has the logits that it has alone.",
        _ones(1, 5, 70),
        questions.keep_rows_apart,
    ),
    Law(
        "left padding",
        "A row that is padded on its left has the logits that it has alone.",
        ROWS,
        partial(questions.ignore_padding, left=True),
    ),
    Law(
        "right padding",
        "A row that is padded on its right has the logits that it has alone.",
        ROWS,
        partial(questions.ignore_padding, left=False),
    ),
    Law(
        "padded gradients",
        "The gradients of a padded batch are the sum of those of its rows.",
        SHORT_ROWS,
        questions.learn_from_padded,
    ),
    Law(
        "gradients in pieces",
        "A text that is read in two calls has the gradients of the whole text at once: those of"
        " the second pass through the cache to the first.",
        _cuts((3, 2), (9, 4), (70, 65)),
        questions.learn_in_pieces,
        required=False,
    ),
    Law(
        "packed by positions",
        "Documents in one row, told apart by position_ids that begin anew, have the logits that"
        " they have alone.",
        ROWS,
        questions.keep_documents_apart,
    ),
    Law(
        "packed by lengths",
        "Documents in one row, told apart by all that transformers' DataCollatorWithFlattening"
        " says, have the logits that they have alone.",
        ROWS,
        questions.keep_flattened_apart,
    ),
    Law(
        "packed chats",
        "Conversations packed as training packs them have the tokens of the tokenizer's own chat"
        " template, and only answers are learnt.",
        tuple(Example(lengths, unit="words") for lengths in ((1, 1), (3, 1, 2, 4))),
        questions.pack_chats,
        allowed=0.0,
    ),
    Law(
        "generated with cache",
        "With a cache, generate has the logits that it has without one.",
        _ones(1, 5, 70),
        questions.generate_with_cache,
    ),
    Law(
        "generated from padded",
        "Prompts of different lengths, padded on their left, are continued as each alone.",
        SHORT_ROWS,
        questions.generate_padded,
    ),
    Law(
        "beams",
        "A search with three beams finds the same scores with a cache as without one.",
        _ones(2, 20),
        questions.search_with_cache,
    ),
    Law(
        "saved and loaded",
        "A model that is saved and loaded has the same weights, bit by bit, and logits.",
        _ones(9),
        questions.come_back_from_disk,
    ),
    Law(
        "repeated",
        "The same call gives the same logits.",
        _ones(1, 70),
        questions.repeat_logits,
        allowed=0.0,
    ),
    Law(
        "repeated gradients",
        "The same call gives the same gradients.",
        _ones(2, 70),
        questions.repeat_gradients,
        allowed=0.0,
    ),
    Law(
        "second derivatives",
        "In float64, the gradients of gradients are what differences of gradients tend to.",
        _ones(2, 9),
        questions.differentiate_twice,
        allowed=1e-2,
    ),
    Law(
        "batch invariant",
        "Inside batch_invariant a text has the same logits, bit by bit, alone or padded in a batch,"
        " at once or in pieces.",
        _rows((3, 2), (9, 4, 2), (70, 3)),
        questions.keep_bits,
        allowed=0.0,
    ),
    Law(
        "label smoothing",
        "Trainer of transformers smooths the labels of the next token, not of the same one.",
        _ones(2, 9),
        questions.smooth_labels,
    ),
    Law(
        "finite",
        "Logits and gradients of one token repeated are finite numbers.",
        _ones(1, 2, 70, 300),
        questions.stay_finite,
    ),
    Law(
        "same as on the CPU",
        "A GPU gives the logits of the CPU.",
        _ones(5, 70),
        questions.agree_with_cpu,
    ),
    Law(
        "shifted positions",
        "Logits depend on distances only: later positions for all tokens change nothing.",
        _cuts((5, 1), (70, 100)),
        questions.shift_positions,
        required=False,
    ),
    Law(
        "bfloat16",
        "Weights rounded to bfloat16 give the same logits up to a tenth of the largest.",
        _ones(9, 70),
        questions.round_to_bfloat16,
        allowed=0.1,
        required=False,
    ),
)
"""All of them, in the order of the report."""
