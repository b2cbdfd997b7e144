"""A conversion as a value, and what the steps of its run share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from fastweights.linearize.convert.attention import branches, softmax_attentions
from fastweights.linearize.convert.conversion import linearize
from fastweights.linearize.convert.landmarks import place_landmarks
from fastweights.linearize.distill.adapt import next_logits, unwrap_adapters
from fastweights.linearize.distill.budget import Budget, CacheBudget, LayerBudget
from fastweights.linearize.distill.criteria import (
    CRITERIA,
    Candidates,
    Criterion,
    Inputs,
    Losses,
    name_of,
)
from fastweights.linearize.distill.fit import (
    copy_parameters,
    read_parameters,
    read_tensors,
    write_tensors,
)
from fastweights.linearize.distill.plan import ConversionPlan, plan
from fastweights.linearize.distill.ranking import Ranking, fingerprint
from fastweights.linearize.distill.recipe import LinearizationRecipe, StageConfig
from fastweights.linearize.distill.teachers import require_same_tokens
from fastweights.render.units import bytes_in_words
from fastweights.runs.checkpoint import no_progress_bars
from fastweights.runs.errors import DataError
from fastweights.runs.files import read_json, write_json
from fastweights.runs.layout import Layout
from fastweights.runs.processes import Processes
from fastweights.runs.ranges import NON_NEGATIVE_INTEGER
from fastweights.runs.report import Reporter
from fastweights.runs.seeds import own_randomness
from fastweights.text.corpus import Corpus
from fastweights.text.documents import Batches, Data, Stream
from fastweights.text.folder import TextFolder
from fastweights.text.tokenizers import require_embeddings

COMPARISON_SEQUENCES = 16
"""Sequences of validation text that layers are ranked and measured by, at most."""
LANDMARKS = "landmarks.safetensors"
"""The landmarks of all layers, if the recipe has any."""
LANDMARK_TOKENS = 16_384
"""Of the training text, among whose keys landmarks are placed."""


@dataclass(frozen=True)
class Conversion:
    """Everything that decides the result of a conversion.

    Attributes:
        model: The softmax model: a folder, or a name on the Hugging Face hub.
        data: The text to train and validate on.
        recipe: What replaces softmax attention, and how it is trained.
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
            is given with a recipe that trains the model's own weights, or what is said of softmax
            layers contradicts itself.
    """

    model: str
    data: Data
    recipe: LinearizationRecipe = LinearizationRecipe()
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
        self._require_landmarks()
        self._require_selection()
        if self.bits not in (None, 4, 8):
            raise ValueError(
                f"bits={self.bits}: the frozen weights have 4 or 8, or None to leave them as"
                " they are"
            )
        if self.bits is not None and self.recipe.changes_weights:
            raise ValueError(
                f"bits={self.bits} with a recipe that trains the model's own weights: quantised"
                " ones are not trained"
            )

    def _require_window(self) -> None:
        analog = self.recipe.analog
        for length in self.lengths:
            if analog.has_window and analog.window >= length:
                raise ValueError(
                    f"window = {analog.window} reaches over every sequence of length = {length}, so"
                    " that the linear attention before it would learn nothing; take longer"
                    " sequences or a smaller window"
                )

    def _require_landmarks(self) -> None:
        analog = self.recipe.analog
        landmarks = 2 * (analog.feature_dim or 0)
        if analog.features == "landmarks" and landmarks > LANDMARK_TOKENS:
            raise ValueError(
                f"feature_dim = {analog.feature_dim:,} makes {landmarks:,} landmarks in each head,"
                f" placed among the keys of {LANDMARK_TOKENS:,} tokens: take"
                f" {LANDMARK_TOKENS // 2:,} columns or fewer"
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
    def lengths(self) -> tuple[int, ...]:
        """The lengths of the sequences in all stages, that of the data first."""
        own = (stage.length for stage in self.recipe.stages if stage.length is not None)
        return tuple(dict.fromkeys((self.data.length, *own)))


def _require_dtype(name: str) -> None:
    if name != "auto" and not isinstance(getattr(torch, name, None), torch.dtype):
        raise ValueError(
            f"dtype = {name!r}; take the name of a dtype of torch, such as float32 or bfloat16, or"
            " auto for the checkpoint's"
        )


def _landmarks_of(model: nn.Module) -> dict[str, Tensor]:
    maps = (".linear_branch.phi_q.", ".linear_branch.phi_k.")
    return {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if any(part in name for part in maps)
    }


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
        finished: The stages whose result the model has.
    """

    conversion: Conversion
    out: Path
    processes: Processes
    reporter: Reporter
    stop: Callable[[], bool]
    layout: Layout = Layout()
    finished: list[StageConfig] = field(default_factory=list)

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
            conversion.recipe,
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
        require_embeddings(tokenizer, self.rows_of(source), source)
        return tokenizer

    @cached_property
    def model(self) -> Any:
        """The linearized model; the steps of the run replace it."""
        return self.linearize_original(self.conversion.layers, self.conversion.bits)

    def train(self, length: int | None = None) -> Batches:
        """Return the text to train on, in an order that the seed decides.

        Args:
            length: Tokens per sequence; None for the conversion's.
        """
        data = self.conversion.data
        return self._text.batches(
            length or data.length, self.conversion.seed, data.responses, data.boundaries
        )

    @property
    def validation(self) -> Stream:
        """The text to validate on."""
        return self.validation_of(None)

    def validation_of(self, length: int | None) -> Stream:
        """Return the text to validate on, as `train` the one to train on."""
        data, text = self.conversion.data, self._text.validation
        return Stream(
            text, min(length or data.length, len(text)), 0, data.responses, data.boundaries
        )

    def require_text(self) -> None:
        """Read the text, which must be long enough to be trained and measured on.

        Raises:
            DataError: If it cannot be read, or is too short.
            Stopped: If reading was stopped.
        """
        for length in self.conversion.lengths:
            self.train(length)
        analog, validation = self.conversion.recipe.analog, self._text.validation
        if analog.has_window and len(validation) <= analog.window:
            raise DataError(
                f"the validation text has {len(validation)} tokens, all within the window of"
                f" {analog.window}; give more text, or take a smaller window"
            )

    def require_teachers(self) -> None:
        """Check the teachers of all stages.

        Raises:
            DataError: If one has other tokens than the model, or fewer logits than are stored.
        """
        for stage in self.conversion.recipe.whole:
            teacher = stage.loss.teacher
            if stage.loss.kl and teacher.model is not None:
                theirs = AutoTokenizer.from_pretrained(teacher.model)
                require_same_tokens(self.tokenizer, theirs, teacher.model)
            if stage.loss.kl and teacher.top_k is not None:
                self._require_logits(teacher.model or self.conversion.model, teacher.top_k)

    def _require_logits(self, source: str, top_k: int) -> None:
        rows = min(self.rows_of(source), self.rows_of(self.conversion.model))
        if top_k >= rows:
            raise DataError(
                f"top_k = {top_k:,} of a teacher with {rows:,} logits are all it has; store fewer,"
                " such as 64, or leave top_k out"
            )

    def rows_of(self, source: str) -> int:
        """Return how many logits a model has, of which only the configuration is read."""
        return AutoConfig.from_pretrained(source).get_text_config().vocab_size

    @cached_property
    def _text(self) -> Corpus:
        """Read once, and kept in the run's folder: sources may change."""
        data = self.conversion.data
        folder = TextFolder(self.out, data, data.length, lambda: self.tokenizer)
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
            measure.require_text(lambda: self.model, self.ranking_text())

    def ranking_text(self) -> list[Inputs]:
        """Return what layers are compared on."""
        measure = self.conversion.rank_by.measure
        return measure.text(self.comparison_batches(), self.tokenizer)

    @property
    def fingerprint(self) -> str:
        """The `fingerprint` of the softmax model."""
        _ = self.model  # whose weights are on this machine from then on
        return fingerprint(self.conversion.model)

    @property
    def trains_candidates(self) -> bool:
        """Whether candidates are trained before layers are compared, and some of them are kept."""
        conversion = self.conversion
        if not conversion.recipe.selection or conversion.ranking is not None:
            return False
        return bool(conversion.budget.choose(self.linear_layers(), self.plan.caches))

    def losses(self) -> Losses:
        """Return what is lost with each choice of linear layers, of the model as it is now."""
        measure, batches = self.conversion.rank_by.measure, self.ranking_text()
        models = Candidates(self.model, self.changed_original())
        return lambda choices: measure.losses(models, batches, choices)

    def rank(self, losses: Losses) -> Ranking:
        """Rank the layers by what is lost with each choice of linear ones."""
        conversion, measure = self.conversion, self.conversion.rank_by.measure
        damage = conversion.rank_by.damage(self.linear_layers(), losses)
        sources = ", ".join(conversion.data.validation or conversion.data.sources)
        batches = self.ranking_text()
        tokens = max(batch["input_ids"].shape[1] for batch in batches)
        return Ranking(
            criterion=name_of(conversion.rank_by),
            measure=f"{measure.words}{self._training_in_words()}",
            damage=dict(sorted(damage.items())),
            order=tuple(damage),
            model=self.fingerprint,
            text=f"{len(batches)} sequences of {tokens} tokens, held out of {sources}",
        )

    def _training_in_words(self) -> str:
        recipe = self.conversion.recipe
        if not self.trains_candidates:
            return ""
        return f", after {recipe.selection:.3g} of the steps of {recipe.whole[0].name}"

    def changed_original(self) -> Callable[[], Any] | None:
        """Return what gives the softmax model as it was, where the weights of the model's own
        attentions have changed; None where it has them still."""
        return None if self.has_own_teacher else self.teacher()

    def load_original(self, bits: int | None = None, source: str | None = None) -> Any:
        """Load the softmax model, or another one by its folder or name."""
        options: dict[str, Any] = {"dtype": self.conversion.dtype}
        if bits is not None:
            options["quantization_config"] = BitsAndBytesConfig(
                load_in_4bit=bits == 4, load_in_8bit=bits == 8
            )
            options["device_map"] = {"": self.device}
        with no_progress_bars():
            model: Any = AutoModelForCausalLM.from_pretrained(
                source or self.conversion.model, **options
            )
        return model if bits is not None else model.to(self.device)

    def linearize_original(self, layers: Iterable[int] | None, bits: int | None) -> Any:
        """Load the softmax model and convert these layers, with the branches' initial
        parameters."""
        torch.manual_seed(self.conversion.seed)
        model = linearize(self.load_original(bits), self.conversion.recipe.analog, layers)
        if self.conversion.recipe.analog.features == "landmarks":
            path = self.out / LANDMARKS
            if not path.exists():
                write_tensors(path, _landmarks_of(self._place_landmarks(model, bits)))
            copy_parameters(model, read_tensors(path))
        return model

    def _place_landmarks(self, model: Any, bits: int | None) -> Any:
        """Place the run's landmarks, once and in all layers: in a model that was made with `bits`,
        or in another if it is quantised or lacks layers. Returns the one that has them."""
        converted = [attention.layer for attention in self.plan.converted]
        if bits is not None or list(branches(model)) != converted:
            model = self.load_original()
            linearize(model, self.conversion.recipe.analog, converted)
        self.reporter.note("placing landmarks among the keys of the training text")
        place_landmarks(model, self._texts_of_landmarks(), self.conversion.seed)
        return model

    def _texts_of_landmarks(self) -> Iterator[dict[str, Tensor]]:
        train = self.train()
        for number in range(-(-LANDMARK_TOKENS // train.length)):
            inputs = train.batch(number, 1)
            yield {name: x.to(self.device) for name, x in inputs.items() if name != "labels"}

    @property
    def is_divided(self) -> bool:
        """Whether the processes divide the model while it is trained, and make it anew then."""
        return self.layout.shard and self.processes.count > 1

    def teacher(self, source: str | None = None) -> Callable[[], Any]:
        """Return what gives a model to learn from, frozen, which is loaded when it is first asked
        for: the softmax model, or another one."""

        def load() -> Any:
            with own_randomness(self.conversion.seed):  # no draw of a step moves
                return self.load_original(source=source).eval().requires_grad_(False)

        return cache(load)

    def logits_of(self, source: str | None = None) -> Callable[[Mapping[str, Tensor]], Tensor]:
        """Return what computes the logits of such a model."""
        teacher = self.teacher(source)
        return torch.no_grad()(lambda inputs: next_logits(teacher(), inputs))

    @property
    def has_own_teacher(self) -> bool:
        """Whether the model, without its adapters and with its softmax, is as it was."""
        changed = any(stage.trained.changes_weights for stage in self.finished)
        return not changed and not self._hides_positions

    @property
    def _hides_positions(self) -> bool:
        """Whether layers are softmax that have no positions any more."""
        hides = self.conversion.recipe.analog.positions == "linear"
        return hides and bool(softmax_attentions(unwrap_adapters(self.model)))

    def original_logits(self) -> Callable[[Mapping[str, Tensor]], Tensor] | None:
        """Return what computes the softmax model's logits, loaded a second time where the model's
        weights have changed; None where the model itself still has them."""
        return None if self.has_own_teacher else self.logits_of()

    def convert_again(self, layers: Iterable[int], bits: int | None) -> Any:
        """Load the softmax model, convert these layers, and give them what the finished stages have
        trained; the others are as they were."""
        layers = list(layers)
        model = self.linearize_original(layers, bits)
        softmax = tuple(
            f"{attention.path}."
            for attention in self.plan.converted
            if attention.layer not in layers
        )
        for stage in self.finished:
            if not stage.trained.changes_weights:
                model = stage.trained.prepare(model, self.conversion.seed)
            trained = read_parameters(self.out / stage.name)
            copy_parameters(
                model, {name: x for name, x in trained.items() if not name.startswith(softmax)}
            )
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
