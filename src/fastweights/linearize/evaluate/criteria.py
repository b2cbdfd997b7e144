"""By what the layers that stay softmax are chosen: which layers are compared, and what is measured
of each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fastweights.linearize.convert.attention import (
    aligned_layers,
    attention_at,
    blocks,
    branches,
    use_mode,
)
from fastweights.linearize.convert.modes import AttentionCall, Mode
from fastweights.linearize.convert.transformers_seams import attentions_with_branch, skip_blocks
from fastweights.linearize.evaluate.far_text import far_text
from fastweights.linearize.evaluate.logits import ReadOut, inputs_of, kl, read_out, read_teacher
from fastweights.models.evaluation import evaluation_mode
from fastweights.shapes import Output
from fastweights.training.language.adapters import has_adapters

OCTAVES = 40
"""Of distances: more than any text has."""
Inputs = Mapping[str, Tensor]
Losses = Callable[[Sequence[Collection[int]]], list[float]]
"""What is lost with linear attention in each of several choices of layers, and softmax in all
others."""


class LinearLayers(Mode):
    """A mode with linear attention in some of the converted layers, and softmax in the others.

    Args:
        layers: The numbers of the linear ones.
    """

    constant = False

    def __init__(self, layers: Collection[int]) -> None:
        self.layers = frozenset(layers)

    def attend(self, call: AttentionCall) -> Output:
        return call.linear() if call.layer in self.layers else call.softmax()


@dataclass(frozen=True, eq=False)
class Candidates:
    """The models that layers are compared by: a linearized one, with softmax in some of its layers.

    A layer that is softmax has the weights that it had before any training.

    Attributes:
        model: The linearized model, with all its converted layers.
        original: Returns the softmax model that it was made from, where the weights of its
            attentions have changed; None where it has them still.
    """

    model: Any
    original: Callable[[], Any] | None = None

    @torch.no_grad()
    def read(self, inputs: Inputs, choices: Sequence[Collection[int]]) -> Iterator[ReadOut]:
        """Read the inputs by the softmax model, then with linear attention in each choice of layers
        and softmax in the others. The layers before the first linear one are not computed again.
        """
        with _block_inputs(self.model) as states:
            if self.original is None:
                softmax = read_teacher(self.model, inputs)
            else:
                softmax = read_out(self.original(), inputs)
        yield softmax
        for layers in choices:
            linear = self._own_weights(layers), use_mode(self.model, LinearLayers(layers))
            with linear[0], linear[1], _beginning_at(self.model, layers, states):
                found = read_out(self.model, inputs)
            yield found

    @contextmanager
    def _own_weights(self, linear: Collection[int]) -> Iterator[None]:
        """Let the layers that are not linear have their own weights for the length of a block."""
        pairs = self._changed_and_own(linear)
        for changed, own in pairs:
            _exchange(changed, own)
        try:
            yield
        finally:
            for changed, own in pairs:
                _exchange(changed, own)

    def _changed_and_own(self, linear: Collection[int]) -> list[tuple[nn.Module, nn.Module]]:
        """The attentions that are not linear, and what they were in the softmax model."""
        if self.original is None:
            return []
        original = self.original()
        return [
            (self.model.get_submodule(path), attention_at(original, path))
            for layer, path in aligned_layers(self.model, blocks=False).items()
            if layer not in linear
        ]


@contextmanager
def _block_inputs(model: nn.Module) -> Iterator[list[Tensor]]:
    """What the blocks of a model read of the call that is made inside; nothing where they read or
    return more than hidden states, or other ones where adapters are."""
    found: list[Tensor] = []

    def take(_: nn.Module, given: tuple[Any, ...], returned: Any) -> None:
        found.extend([given[0]] if given and isinstance(returned, Tensor) else [])

    every = [] if has_adapters(model) else blocks(model)
    with ExitStack() as hooked:
        for block in every:
            hooked.enter_context(block.register_forward_hook(take))
        yield found
    if len(found) != len(every):
        found.clear()


@contextmanager
def _beginning_at(
    model: nn.Module, layers: Collection[int], states: Sequence[Tensor]
) -> Iterator[None]:
    """Let calls begin at the first block that has one of the layers, which reads what it has read
    before."""
    every = blocks(model) if states and layers else []
    linear = (
        i
        for i, block in enumerate(every)
        if any(one.layer_idx in layers for one in attentions_with_branch(block))
    )
    if not (first := next(linear, 0)):
        yield
        return
    take = lambda _, given: (states[first], *given[1:])  # noqa: E731
    with skip_blocks(every[:first]), every[first].register_forward_pre_hook(take):
        yield


def _exchange(one: nn.Module, other: nn.Module) -> None:
    """Exchange the values of the parameters that both have."""
    there = dict(other.named_parameters())
    for name, p in one.named_parameters():
        if name in there:
            p.data, there[name].data = there[name].data, p.data


class LossMeasure(ABC):
    """What a model loses where layers are linear; of one's own, by `losses`."""

    words: ClassVar[str]
    """What is measured, for axes and tables."""

    @abstractmethod
    def losses(
        self, models: Candidates, batches: Iterable[Inputs], choices: Sequence[Collection[int]]
    ) -> list[float]:
        """Measure what is lost with linear attention in each of `choices` of layers.

        Args:
            models: The models that are compared.
            batches: Inputs of the model; ``labels`` among them are ignored.
            choices: Numbers of the layers that are linear at the same time.

        Raises:
            ValueError: If the text cannot show it.
        """

    def text(self, sequences: Sequence[Inputs], tokenizer: Any, length: int) -> list[Inputs]:
        """Make what is measured on of some sequences of text ``[1 t]``: by default they are it.

        Args:
            sequences: The text.
            tokenizer: Its tokenizer.
            length: Tokens of the texts by which windows were divided, if that matters.

        Raises:
            DataError: If it cannot be made of them.
        """
        return list(sequences)

    def require_text(self, load: Callable[[], Any], batches: Iterable[Inputs]) -> None:  # noqa: B027
        """Check that a text can show it, before a model is trained.

        Args:
            load: Returns the model, as it begins.
            batches: As in `losses`.

        Raises:
            ValueError: If it cannot.
        """


@dataclass(frozen=True)
class Divergence(LossMeasure):
    """KL(softmax ‖ model) of the next token in nats, the mean over batches."""

    words: ClassVar[str] = "KL from softmax, nats per token"

    def losses(
        self, models: Candidates, batches: Iterable[Inputs], choices: Sequence[Collection[int]]
    ) -> list[float]:
        with evaluation_mode(models.model):
            rows = [list(self._of_batch(models, batch, choices)) for batch in batches]
        return [sum(column) / len(rows) for column in zip(*rows, strict=True)]

    def _of_batch(
        self, models: Candidates, batch: Inputs, choices: Sequence[Collection[int]]
    ) -> Iterator[float]:
        reads = models.read(inputs_of(batch, models.model.device), choices)
        wanted = next(reads).next_logits().flatten(0, 1)
        for read in reads:
            yield float(kl(wanted, read.next_logits().flatten(0, 1)))


@dataclass(frozen=True)
class RecallLost(LossMeasure):
    """The share of what softmax recalls from beyond the window that the model does not recall.

    The text is `far_text`: inputs with ``distance [b t]``, from how many tokens back a token can be
    recalled, 0 where nothing must be. What softmax predicts rightly of it counts. The share is the
    mean over octaves of distance, so that few tokens far back weigh as much as many nearer ones.
    HALO (arXiv 2601.22156) chooses layers by recall, too, on question answering.
    """

    words: ClassVar[str] = "share of recalled tokens that are lost"

    def text(self, sequences: Sequence[Inputs], tokenizer: Any, length: int) -> list[Inputs]:
        """Make as many tokens of far text, in texts as long as those by which windows were divided:
        what a wide head recalls does not show in shorter ones."""
        ids = torch.cat([sequence["input_ids"][0] for sequence in sequences])
        prose = tokenizer.decode(ids, skip_special_tokens=True)
        length = max(length, *(sequence["input_ids"].shape[1] for sequence in sequences))
        count = max(1, round(len(ids) / length))
        made = far_text(tokenizer, [prose], count=count, length=length)
        rows = zip(made.tokens.split(1), made.distance.split(1), strict=True)
        return [{"input_ids": tokens, "distance": distance} for tokens, distance in rows]

    def require_text(self, load: Callable[[], Any], batches: Iterable[Inputs]) -> None:
        self.losses(Candidates(load()), batches, [])

    def losses(
        self, models: Candidates, batches: Iterable[Inputs], choices: Sequence[Collection[int]]
    ) -> list[float]:
        window = _window(models.model)
        with evaluation_mode(models.model):
            rows = [_recalls(models, batch, choices, window) for batch in batches]
        total, *lost = torch.stack(rows).sum(0)
        if not total.any():
            raise ValueError(
                f"the softmax model recalls no token from beyond the window of {window}, so that"
                " recall cannot tell its layers apart; take longer sequences, or another criterion,"
                " such as damage"
            )
        # octaves weigh alike, those in which softmax recalls nothing left out
        there = total > 0
        return [float((count[there] / total[there]).mean()) for count in lost]


def _recalls(
    models: Candidates, batch: Inputs, choices: Sequence[Collection[int]], window: int
) -> Tensor:
    """``[1 + choices, octaves]``: how many tokens softmax recalls from beyond the window, and how
    many of them each choice of linear layers does not."""
    ids, distance = (batch[name].to(models.model.device) for name in ("input_ids", "distance"))
    far = distance[:, 1:] > window
    targets, distance = ids[:, 1:][far], distance[:, 1:][far]
    reads = models.read({"input_ids": ids}, choices)
    # logits are made of the states before these tokens alone
    softmax, *found = (
        read.logits(read.states[:, :-1][far]).argmax(-1) == targets for read in reads
    )
    return torch.stack(
        [_by_octave(distance[some]) for some in (softmax, *(softmax & ~own for own in found))]
    )


def _by_octave(distance: Tensor) -> Tensor:
    """How many of these distances lie in each octave."""
    return distance.log2().long().bincount(minlength=OCTAVES).cpu()


def _window(model: Any) -> int:
    """The window of the model's key heads, the mean where they have windows of their own: what is
    farther back is beyond most of them, and a text is seldom longer than the widest."""
    found = branches(model).values()
    windows = [window for one in found for window in one.config.windows_of(one.attention)]
    return sum(windows) // len(windows)


@dataclass(frozen=True)
class Criterion(ABC):
    """How layers are compared by what is lost; one of one's own by `damage`.

    Attributes:
        measure: What is measured.
    """

    measure: LossMeasure = Divergence()

    @abstractmethod
    def damage(self, layers: Sequence[int], losses: Losses) -> dict[int, float]:
        """Measure what each layer does alone, in the unit of the measure.

        Args:
            layers: The layers that can be linear.
            losses: What is lost with linear attention in each of several choices of them.

        Returns:
            The damage by layer, the layer that is to stay softmax first of all in front.
        """


class AloneLinear(Criterion):
    """By what is lost where one layer alone is linear."""

    def damage(self, layers: Sequence[int], losses: Losses) -> dict[int, float]:
        found = losses([{layer} for layer in layers])
        return _worst_first(dict(zip(layers, found, strict=True)))


class AloneRestored(Criterion):
    """By what is gained where one layer alone is softmax again, and all others are linear.

    What layers do together counts here: one whose work another can do is not needed. So
    fla-org/hybrid-distillation chooses layers by KL, after a short distillation of every candidate.
    """

    def damage(self, layers: Sequence[int], losses: Losses) -> dict[int, float]:
        linear, *restored = losses([layers, *_each_left_out(layers)])
        gained = [linear - loss for loss in restored]
        return _worst_first(dict(zip(layers, gained, strict=True)))


class RestoredInTurn(Criterion):
    """By what is gained as one layer after the other is made softmax again, each time the best one.

    It asks for the losses of L (L + 1) / 2 choices of L layers, where the others ask for L or so.
    """

    def damage(self, layers: Sequence[int], losses: Losses) -> dict[int, float]:
        left, gained = list(layers), dict[int, float]()
        (before,) = losses([left])
        while left:
            found = losses(_each_left_out(left))
            least = min(found)
            # the layer that leaves the least stays softmax from now on
            best = left.pop(found.index(least))
            gained[best], before = before - least, least
        return gained


def _each_left_out(layers: Sequence[int]) -> list[list[int]]:
    return [[other for other in layers if other != layer] for layer in layers]


def _worst_first(damage: Mapping[int, float]) -> dict[int, float]:
    return {layer: damage[layer] for layer in sorted(damage, key=lambda layer: -damage[layer])}


def choices_of(criterion: Criterion, layers: Sequence[int]) -> list[Collection[int]]:
    """Return the choices of linear layers whose losses a criterion asks for, if all are alike."""
    asked: list[Collection[int]] = []

    def losses(choices: Sequence[Collection[int]]) -> list[float]:
        asked.extend(choices)
        return [0.0] * len(choices)

    criterion.damage(layers, losses)
    return asked


CRITERIA: Mapping[str, Criterion] = {
    "damage": AloneLinear(),
    "restored": AloneRestored(),
    "greedy": RestoredInTurn(),
    "recall": AloneLinear(RecallLost()),
}
"""By what layers are chosen, by name:

- damage: KL from softmax where the layer alone is linear;
- restored: how far KL falls where the layer alone is softmax again;
- greedy: the same, with those softmax that were chosen before;
- recall: the share of what softmax recalls from far back that is lost where the layer alone is
  linear.
"""


def name_of(criterion: Criterion) -> str:
    """Return a criterion's name in `CRITERIA`, or that of its class."""
    names = (name for name, known in CRITERIA.items() if known == criterion)
    return next(names, type(criterion).__name__)
