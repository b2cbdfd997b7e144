"""The model that a run trains, and the models that it is made of and learns from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from fastweights.errors import DataError
from fastweights.linearize.convert.attention import branches, softmax_attentions
from fastweights.linearize.convert.conversion import linearize
from fastweights.linearize.convert.landmarks import place_landmarks, read_keys
from fastweights.linearize.convert.rotary import positions_of
from fastweights.linearize.convert.window_budget import (
    AGE,
    FEWEST,
    HeadSizes,
    head_bytes,
    set_sizes,
    share_state,
    share_windows,
)
from fastweights.linearize.distill.conversion import LANDMARK_TOKENS
from fastweights.linearize.distill.fit import (
    copy_parameters,
    read_parameters,
    read_tensors,
    write_tensors,
)
from fastweights.linearize.distill.recipe import StageConfig
from fastweights.linearize.distill.run import ConversionRun, ConversionText, logit_count
from fastweights.linearize.distill.teachers import require_same_tokens
from fastweights.linearize.evaluate.logits import (
    ReadOut,
    inputs_of,
    read_out,
    unwrap_adapters,
)
from fastweights.render.units import bytes_in_words
from fastweights.training.loop.checkpoint import no_progress_bars
from fastweights.training.loop.seeds import own_randomness

LANDMARKS = "landmarks.safetensors"
"""The landmarks of all layers, and windows of heads, if the recipe has any."""
WINDOWS, COLUMNS = "windows.", "columns."
"""What the windows of a layer's key heads, and their columns, are called there, before its number.
"""
LONG, LONG_TOKENS = 1024, 2048
"""Tokens of a text by which windows are divided, whatever the length of sequences, and of all. So
many are read at once, too, among whose keys landmarks are placed."""
LONG_OF_BUDGET = 4096
"""Tokens of the one text by which a budget is divided, in windows of up to half of it."""
FEWEST_TOKENS = 4096
"""Among whose keys up to 32 landmarks are placed. Of SmolLM2 with 32 they serve as well as 16,384
(perplexity 26.4 of WikiText-2), of 64 half of these do not (32.3 and 30.5)."""


def tokens_for_landmarks(landmarks: int) -> int:
    """Return among the keys of how many tokens so many landmarks are placed."""
    return min(LANDMARK_TOKENS, max(FEWEST_TOKENS, 4 * landmarks**2))


def long_texts(state_budget: int | None, reach: int | None) -> tuple[int, int]:
    """Return the tokens of a text by which windows are divided, and those of all such texts, for a
    model with so many positions."""
    if state_budget is None:
        return min(LONG, reach or LONG), LONG_TOKENS
    return min(LONG_OF_BUDGET, reach or LONG_OF_BUDGET), LONG_OF_BUDGET


def _landmarks_of(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: tensor.detach()
        for name, tensor in chain(model.named_parameters(), model.named_buffers())
        if ".linear_branch." in name and (".phi_q." in name or ".phi_k." in name)
    }


def _sizes_of(tensors: Mapping[str, Tensor]) -> HeadSizes:
    """The sizes of key heads among what `LANDMARKS` holds."""
    return HeadSizes(
        *(
            {
                int(name.removeprefix(prefix)): tuple(row.tolist())
                for name, row in tensors.items()
                if name.startswith(prefix)
            }
            for prefix in (WINDOWS, COLUMNS)
        )
    )


def room_for_heads(run: ConversionRun) -> int:
    """Return what the windows and landmarks of all key heads may take of a run's budget.

    Raises:
        ValueError: If the smallest do not fit.
    """
    budget, analog = run.conversion.state_budget or 0, run.conversion.recipe.analog
    planned = run.plan
    # weights are those of the model, and the branches' in float32
    itemsize = (planned.weights - 4 * planned.branch) // planned.parameters
    beside, least = planned.state, 0
    for one in planned.converted:
        own = head_bytes(one, analog.window, analog.columns(one), itemsize)
        # without the key heads' own, which count the ages one by one; the plan's are shared
        beside += (one.kv_heads - 1) * AGE * (analog.window - 1) - one.kv_heads * own
        least += one.kv_heads * head_bytes(one, FEWEST, analog.columns(one), itemsize)
    if budget < beside + least:
        raise ValueError(
            f"a state of {bytes_in_words(budget)} per sequence cannot be met: with windows of"
            f" {FEWEST} tokens in every key head it takes {bytes_in_words(beside + least)}; allow"
            " as much, or take fewer landmarks (feature_dim)"
        )
    return budget - beside


@dataclass(frozen=True, eq=False)
class ModelLoader:
    """Loads the models of a run: the softmax model, what it is converted to, and teachers.

    Attributes:
        run: The run.
        text: Its text, among whose keys landmarks are placed.
    """

    run: ConversionRun
    text: ConversionText

    def require_teachers(self) -> None:
        """Check the teachers of all stages.

        Raises:
            DataError: If one has other tokens than the model, or fewer logits than are stored.
        """
        for stage in self.run.conversion.recipe.whole:
            teacher = stage.loss.teacher
            if stage.loss.kl and teacher.model is not None:
                theirs = AutoTokenizer.from_pretrained(teacher.model)
                require_same_tokens(self.text.tokenizer, theirs, teacher.model)
            if stage.loss.kl and teacher.top_k is not None:
                self._require_logits(teacher.model or self.run.conversion.model, teacher.top_k)

    def _require_logits(self, source: str, top_k: int) -> None:
        rows = min(logit_count(source), logit_count(self.run.conversion.model))
        if top_k >= rows:
            raise DataError(
                f"top_k = {top_k:,} of a teacher with {rows:,} logits are all it has; store fewer,"
                " such as 64, or leave top_k out"
            )

    def load(self, bits: int | None = None, source: str | None = None) -> Any:
        """Load the softmax model, or another one by its folder or name."""
        options: dict[str, Any] = {"dtype": self.run.conversion.dtype}
        if bits is not None:
            options["quantization_config"] = BitsAndBytesConfig(
                load_in_4bit=bits == 4, load_in_8bit=bits == 8
            )
            options["device_map"] = {"": self.run.device}
        with no_progress_bars():
            model: Any = AutoModelForCausalLM.from_pretrained(
                source or self.run.conversion.model, **options
            )
        return model if bits is not None else model.to(self.run.device)

    def linearize(self, layers: Iterable[int] | None, bits: int | None) -> Any:
        """Load the softmax model and convert these layers, with the branches' initial
        parameters."""
        torch.manual_seed(self.run.conversion.seed)
        model = linearize(self.load(bits), self.run.conversion.recipe.analog, layers)
        if self.run.conversion.recipe.analog.features == "landmarks":
            path = self.run.out / LANDMARKS
            if not path.exists():
                write_tensors(path, self._place_landmarks(model, bits))
            placed = read_tensors(path)
            sizes = _sizes_of(placed)
            if sizes.windows:
                set_sizes(model, sizes)
            copy_parameters(model, placed)
        return model

    def _place_landmarks(self, model: Any, bits: int | None) -> dict[str, Tensor]:
        """Place the run's landmarks and divide its windows, once and in all layers: in a model that
        was made with `bits`, or in another if it is quantised or lacks layers. Returns them."""
        converted = [attention.layer for attention in self.run.plan.converted]
        if bits is not None or list(branches(model)) != converted:
            model = self.load()
            linearize(model, self.run.conversion.recipe.analog, converted)
        sizes = self._share(model)
        rows = {
            f"{prefix}{layer}": torch.tensor(row)
            for prefix, of in ((WINDOWS, sizes.windows), (COLUMNS, sizes.columns))
            for layer, row in of.items()
        }
        return {**_landmarks_of(model), **rows}

    def _share(self, model: Any) -> HeadSizes:
        """Place landmarks in a model, and divide its windows or its budget."""
        conversion, follow = self.run.conversion, self.run.follow
        columns = (one.config.columns(one.attention) for one in branches(model).values())
        texts = self._texts_of_landmarks(2 * max(columns))
        longest = self._long_texts(*long_texts(conversion.state_budget, positions_of(model.config)))
        if conversion.state_budget is not None:
            keys, room = read_keys(model, texts, follow), room_for_heads(self.run)
            found = share_state(model, longest, keys, room, seed=conversion.seed, follow=follow)
            self.run.reporter.note(found.in_words())
            return found
        place_landmarks(model, texts, conversion.seed, follow)
        if not conversion.recipe.analog.windows_by_head:
            return HeadSizes({})
        return HeadSizes(share_windows(model, longest, follow=follow))

    def _long_texts(self, length: int, tokens: int) -> list[dict[str, Tensor]]:
        """Texts whose documents are read as one: short ones do not show what heads read from far
        back."""
        train = self.text.train()
        count = -(-tokens // train.length)
        ids = [train.batch(number, 1)["input_ids"] for number in range(count)]
        joined = torch.cat(ids, 1).to(self.run.device)
        return [{"input_ids": text} for text in joined.split(max(length, train.length), 1)]

    def _texts_of_landmarks(self, landmarks: int) -> list[dict[str, Tensor]]:
        train = self.text.train()
        count = -(-tokens_for_landmarks(landmarks) // train.length)
        some = max(1, LONG // train.length)
        texts = [train.batch(n, min(some, count - n)) for n in range(0, count, some)]
        return [inputs_of(text, self.run.device) for text in texts]

    def teacher(self, source: str | None = None) -> Callable[[], Any]:
        """Return what gives a model to learn from, frozen, which is loaded when it is first asked
        for: the softmax model, or another one."""

        def load() -> Any:
            with own_randomness(self.run.conversion.seed):  # no draw of a step moves
                return self.load(source=source).eval().requires_grad_(False)

        return cache(load)

    def reader_of(self, source: str | None = None) -> Callable[[Mapping[str, Tensor]], ReadOut]:
        """Return what reads inputs with such a model."""
        teacher = self.teacher(source)
        return torch.no_grad()(lambda inputs: read_out(teacher(), inputs))


@dataclass(frozen=True, eq=False)
class StudentModel:
    """The linearized model as a step of the run leaves it.

    Attributes:
        loader: Loads the models of the run.
        load: Returns the model, which is asked for when it is needed first.
        finished: The stages whose result the model has.
    """

    loader: ModelLoader
    load: Callable[[], Any]
    finished: tuple[StageConfig, ...] = ()

    @classmethod
    def begin(cls, run: ConversionRun) -> StudentModel:
        """Return the model as a run begins with it."""
        loader, conversion = ModelLoader(run, ConversionText(run)), run.conversion
        return cls(loader, lambda: loader.linearize(conversion.layers, conversion.bits))

    @property
    def run(self) -> ConversionRun:
        """The run."""
        return self.loader.run

    @property
    def text(self) -> ConversionText:
        """The text of the run."""
        return self.loader.text

    @cached_property
    def model(self) -> Any:
        """The model."""
        return self.load()

    def with_model(self, model: Any) -> StudentModel:
        """Return the student with another model of the same stages."""
        return replace(self, load=lambda: model)

    def after(self, stage: StageConfig) -> StudentModel:
        """Return the student with one more finished stage."""
        return replace(self.with_model(self.model), finished=(*self.finished, stage))

    def linear_layers(self) -> list[int]:
        """The layers of the model that are linear now."""
        return list(branches(self.model))

    @property
    def has_own_teacher(self) -> bool:
        """Whether the model, without its adapters and with its softmax, is as it was."""
        changed = any(stage.trained.changes_weights for stage in self.finished)
        return not changed and not self._hides_positions

    @property
    def _hides_positions(self) -> bool:
        """Whether layers are softmax that have no positions any more."""
        hides = self.run.conversion.recipe.analog.positions == "linear"
        return hides and bool(softmax_attentions(unwrap_adapters(self.model)))

    def changed_original(self) -> Callable[[], Any] | None:
        """Return what gives the softmax model as it was, where the weights of the model's own
        attentions have changed; None where it has them still."""
        return None if self.has_own_teacher else self.loader.teacher()

    def convert_again(self, layers: Iterable[int], bits: int | None) -> Any:
        """Load the softmax model, convert these layers, and give them what the finished stages have
        trained; the others are as they were."""
        layers = list(layers)
        model = self.loader.linearize(layers, bits)
        softmax = tuple(
            f"{attention.path}."
            for attention in self.run.plan.converted
            if attention.layer not in layers
        )
        for stage in self.finished:
            if not stage.trained.changes_weights:
                model = stage.trained.prepare(model, self.run.conversion.seed)
            # but for what was trained of layers that are softmax again
            trained = read_parameters(self.run.out / stage.name)
            copy_parameters(
                model, {name: x for name, x in trained.items() if not name.startswith(softmax)}
            )
        return model
