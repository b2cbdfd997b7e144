"""A conversion as a value, and what the steps of its run share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from fastweights.linearize.convert.attention import branches
from fastweights.linearize.convert.conversion import linearize
from fastweights.linearize.distill.budget import Budget, CacheBudget, LayerBudget
from fastweights.linearize.distill.criteria import CRITERIA, Criterion, Inputs, Measure, name_of
from fastweights.linearize.distill.fit import copy_parameters
from fastweights.linearize.distill.methods import LinearizationMethod
from fastweights.linearize.distill.plan import ConversionPlan, plan
from fastweights.linearize.distill.ranking import Ranking, fingerprint
from fastweights.render.units import bytes_in_words
from fastweights.runs.checkpoint import no_progress_bars
from fastweights.runs.errors import DataError
from fastweights.runs.files import read_json, write_json
from fastweights.runs.layout import Layout
from fastweights.runs.processes import Processes
from fastweights.runs.ranges import NON_NEGATIVE_INTEGER
from fastweights.runs.report import Reporter
from fastweights.text.corpus import Corpus
from fastweights.text.documents import Batches, Data, Stream
from fastweights.text.folder import TextFolder

COMPARISON_SEQUENCES = 16
"""Sequences of validation text that layers are ranked and measured by, at most."""


@dataclass(frozen=True)
class Conversion:
    """Everything that decides the result of a conversion.

    Attributes:
        model: The softmax model: a folder, or a name on the Hugging Face hub.
        data: The text to train and validate on.
        method: What replaces softmax attention, and how it is trained.
        layers: Numbers of the layers to convert; None for all that can be.
        softmax_layers: How many of them become softmax again: the first of the ranking.
        dtype: Dtype of the model's own weights, such as "bfloat16"; "auto" for the checkpoint's.
        seed: Seed of the order of the text, and of what branches and adapters start from.
        bits: Bits of the frozen weights while the rest is trained, 4 or 8 (bitsandbytes); None for
            `dtype`. The result has its weights in `dtype` all the same.
        rank_by: By what layers are ranked.
        ranking: The ranking of another run of the same model; None to rank by `rank_by`.
        cache_budget: What the cache may take, in place of `softmax_layers`; None for a number.

    Raises:
        ValueError: If a number lies outside of its range, a window covers every sequence, `bits`
            is given with a method that trains all weights, or what is said of softmax layers
            contradicts itself.
    """

    model: str
    data: Data
    method: LinearizationMethod = LinearizationMethod()
    layers: tuple[int, ...] | None = None
    softmax_layers: int = 0
    dtype: str = "auto"
    seed: int = 0
    bits: int | None = None
    rank_by: Criterion = CRITERIA["damage"]
    ranking: Ranking | None = None
    cache_budget: CacheBudget | None = None

    def __post_init__(self) -> None:
        NON_NEGATIVE_INTEGER.require(softmax_layers=self.softmax_layers, seed=self.seed)
        _require_dtype(self.dtype)
        self._require_window()
        self._require_selection()
        if self.bits not in (None, 4, 8):
            raise ValueError(
                f"bits={self.bits}: the frozen weights have 4 or 8, or None to leave them as"
                " they are"
            )
        if self.bits is not None and self.trains_all_weights:
            raise ValueError(
                f"bits={self.bits} with a method that adapts all weights: quantised ones are not"
                " trained"
            )

    def _require_window(self) -> None:
        analog, length = self.method.analog, self.data.length
        if analog.has_window and analog.window >= length:
            raise ValueError(
                f"window = {analog.window} reaches over every sequence of length = {length}, so"
                " that the linear attention before it would learn nothing; take longer sequences"
                " or a smaller window"
            )

    def _require_selection(self) -> None:
        if self.softmax_layers and self.cache_budget is not None:
            raise ValueError(
                f"softmax_layers = {self.softmax_layers} and a budget of"
                f" {bytes_in_words(self.cache_budget.size)} for the cache: give one of the two"
            )
        if self.ranking is not None:
            if self.rank_by != CRITERIA["damage"]:
                raise ValueError(
                    f"a ranking by {self.ranking.criterion} is given, and a criterion to rank by:"
                    " give one of the two"
                )
            if self.softmax_layers == 0 and self.cache_budget is None:
                raise ValueError(
                    "a ranking is given, and no layer stays softmax: give softmax_layers or"
                    " cache_budget, too, or leave the ranking out"
                )

    @property
    def budget(self) -> Budget:
        """What the layers that stay softmax may take."""
        return self.cache_budget or LayerBudget(self.softmax_layers)

    @property
    def trains_all_weights(self) -> bool:
        """Whether stage two changes the model's own weights instead of adding adapters."""
        return self.method.adapt is not None and self.method.adapt.lora is None


def _require_dtype(name: str) -> None:
    if name != "auto" and not isinstance(getattr(torch, name, None), torch.dtype):
        raise ValueError(
            f"dtype = {name!r}; take the name of a dtype of torch, such as float32 or bfloat16, or"
            " auto for the checkpoint's"
        )


@dataclass(eq=False)
class ConversionContext:
    """What the steps of a run share: its folder, its text, and the model as the last step left it.

    Attributes:
        conversion: The conversion.
        out: The run's folder.
        processes: The processes that train the model together.
        reporter: Receives progress events.
        stop: Returns True when the run should end after the current step.
        layout: How the model lies in the memory of the processes while it is trained.
    """

    conversion: Conversion
    out: Path
    processes: Processes
    reporter: Reporter
    stop: Callable[[], bool]
    layout: Layout = Layout()

    @property
    def device(self) -> torch.device:
        """The device on which the model of this process computes."""
        return self.processes.device

    @cached_property
    def plan(self) -> ConversionPlan:
        """The numbers of the conversion.

        Raises:
            CannotLinearize: If the conversion is not possible.
        """
        conversion = self.conversion
        return plan(
            conversion.model,
            conversion.method,
            layers=conversion.layers,
            length=conversion.data.length,
            dtype=None if conversion.dtype == "auto" else getattr(torch, conversion.dtype),
        )

    @cached_property
    def tokenizer(self) -> Any:
        """The model's own tokenizer.

        Raises:
            DataError: If it gives texts tokens for which the model has no embeddings.
        """
        source = self.conversion.model
        tokenizer: Any = AutoTokenizer.from_pretrained(source)
        rows = AutoConfig.from_pretrained(source).get_text_config().vocab_size
        ends = tokenizer.bos_token_id or 0, tokenizer.eos_token_id or 0
        last = max(tokenizer.vocab_size - 1, *ends)
        if last >= rows:
            raise DataError(
                f"the tokenizer in {source} has tokens up to {last:,}, the model embeddings for"
                f" {rows:,}; put the tokenizer there that the model was trained with"
            )
        return tokenizer

    @cached_property
    def model(self) -> Any:
        """The linearized model; the steps of the run replace it."""
        return self.linearize_original(self.conversion.layers, self.conversion.bits)

    @cached_property
    def train(self) -> Batches:
        """The text to train on, in an order that the seed decides."""
        data = self.conversion.data
        return self._text.batches(
            data.length, self.conversion.seed, data.responses, data.boundaries
        )

    @property
    def validation(self) -> Stream:
        """The text to validate on."""
        data, text = self.conversion.data, self._text.validation
        return Stream(text, min(data.length, len(text)), 0, data.responses, data.boundaries)

    def require_text(self) -> None:
        """Read the text, which must be long enough to be trained and measured on.

        Raises:
            DataError: If it cannot be read, or is too short.
            Stopped: If reading was stopped.
        """
        _ = self.train
        analog, validation = self.conversion.method.analog, self._text.validation
        if analog.has_window and len(validation) <= analog.window:
            raise DataError(
                f"the validation text has {len(validation)} tokens, all within the window of"
                f" {analog.window}; give more text, or take a smaller window"
            )

    @cached_property
    def _text(self) -> Corpus:
        """Read once, and kept in the run's folder: sources may change."""
        folder = TextFolder(self.out, self.conversion.data.request(), lambda: self.tokenizer)
        return folder.open(self.processes.is_first, self.reporter, self.stop)

    def comparison_batches(self) -> list[dict[str, Tensor]]:
        """A few sequences of validation text, one by one."""
        found = zip(
            range(COMPARISON_SEQUENCES), self.validation.sequential_batches(1), strict=False
        )
        return [batch for _, batch in found]

    def require_budget(self) -> None:
        """Check that what the softmax layers may take allows for a conversion.

        Raises:
            ValueError: If it does not.
        """
        layers = [attention.layer for attention in self.plan.converted]
        self.conversion.budget.choose(layers, self.plan.caches)

    def require_ranking(self) -> None:
        """Check that the ranking that is given is of this model, or that the text can show what its
        layers are to be ranked by.

        Raises:
            ValueError: If it is not, or cannot.
        """
        conversion = self.conversion
        if conversion.ranking is not None:
            layers = [attention.layer for attention in self.plan.converted]
            conversion.ranking.require(self.fingerprint, layers)
        else:
            measure = conversion.rank_by.measure
            measure.require_text(lambda: self.model, self._ranking_text(measure))

    def _ranking_text(self, measure: Measure) -> list[Inputs]:
        return measure.text(self.comparison_batches(), self.tokenizer)

    @property
    def fingerprint(self) -> str:
        """The `fingerprint` of the softmax model."""
        _ = self.model  # whose weights are on this machine from then on
        return fingerprint(self.conversion.model)

    def rank(self) -> Ranking:
        """Rank the layers of the model as it is now."""
        conversion, measure = self.conversion, self.conversion.rank_by.measure
        batches = self._ranking_text(measure)
        damage = conversion.rank_by.damage(
            self.linear_layers(), lambda choices: measure.losses(self.model, batches, choices)
        )
        sources = ", ".join(conversion.data.validation or conversion.data.sources)
        tokens = max(batch["input_ids"].shape[1] for batch in batches)
        return Ranking(
            criterion=name_of(conversion.rank_by),
            measure=measure.words,
            damage=dict(sorted(damage.items())),
            order=tuple(damage),
            model=self.fingerprint,
            text=f"{len(batches)} sequences of {tokens} tokens, held out of {sources}",
        )

    def load_original(self, bits: int | None = None) -> Any:
        """Load the softmax model."""
        options: dict[str, Any] = {"dtype": self.conversion.dtype}
        if bits is not None:
            options["quantization_config"] = BitsAndBytesConfig(
                load_in_4bit=bits == 4, load_in_8bit=bits == 8
            )
            options["device_map"] = {"": self.device}
        with no_progress_bars():
            model: Any = AutoModelForCausalLM.from_pretrained(self.conversion.model, **options)
        return model if bits is not None else model.to(self.device)

    def linearize_original(self, layers: Iterable[int] | None, bits: int | None) -> Any:
        """Load the softmax model and convert these layers, with the branches' initial
        parameters."""
        torch.manual_seed(self.conversion.seed)
        return linearize(self.load_original(bits), self.conversion.method.analog, layers)

    @property
    def is_divided(self) -> bool:
        """Whether the processes divide the model while it is trained, and make it anew then."""
        return self.layout.shard and self.processes.count > 1

    def branch_parameters(self) -> dict[str, Tensor]:
        """Copy the parameters of the model's branches."""
        return {
            name: x.detach().clone()
            for name, x in self.model.named_parameters()
            if "linear_branch" in name
        }

    def convert_again(
        self,
        layers: Iterable[int],
        bits: int | None,
        trained: Mapping[str, Tensor] | None = None,
    ) -> Any:
        """Load the softmax model and convert these layers, with the branches' trained parameters:
        those given, or else those of the present model."""
        trained = self.branch_parameters() if trained is None else trained
        model = self.linearize_original(layers, bits)
        copy_parameters(model, trained)
        return model

    def linear_layers(self) -> list[int]:
        """The layers of the model that are linear now."""
        return list(branches(self.model))

    def read(self, name: str) -> Any:
        """Read the numbers in ``<name>.json``."""
        return read_json(self.out / f"{name}.json")

    def write(self, name: str, numbers: Mapping[str, Any]) -> None:
        """Write numbers to ``<name>.json``."""
        write_json(self.out / f"{name}.json", numbers)
