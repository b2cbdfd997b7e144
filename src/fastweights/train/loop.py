"""Training of a language model on text that can be killed at any moment and resumed with the same
result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM, find_preset
from fastweights.runs.checkpoint import no_progress_bars, save_model
from fastweights.runs.evaluation import evaluation_mode
from fastweights.runs.files import atomic_folder
from fastweights.runs.folder import is_run
from fastweights.runs.loop import End, run_in_folder
from fastweights.runs.metrics import Row
from fastweights.runs.processes import Alone, Processes, join_processes
from fastweights.runs.ranges import POSITIVE_INTEGER
from fastweights.runs.report import Reporter, Result
from fastweights.runs.stage import Every, Optimization, StoredStage, go_backward
from fastweights.text.corpus import Text, Windows, load_corpus, read_corpus, sequential_windows
from fastweights.train.memory import require_memory_to_train
from fastweights.train.numerics import record_numerics
from fastweights.train.plot import plot

__all__ = [
    "Architecture",
    "Every",
    "HuggingFace",
    "PresetArchitecture",
    "TrainConfig",
    "train",
]


@dataclass(frozen=True)
class Architecture:
    """The architecture of a language model of this library.

    Attributes:
        mixers: One ``{"name": …, …arguments}`` per mixer, repeated over the blocks.
        layers: Number of blocks.
        width: Hidden size.
    """

    mixers: tuple[Mapping[str, object], ...] = ({"name": "metala"},)
    layers: int = 4
    width: int = 128

    def build(self, tokenizer: PreTrainedTokenizerBase) -> FastWeightsForCausalLM:
        """Build a new model for `tokenizer`.

        Raises:
            ValueError: If sizes do not fit each other.
        """
        end = cast(int | None, tokenizer.eos_token_id)
        return FastWeightsForCausalLM(self.config(len(tokenizer), end))

    def config(self, vocabulary: int = 1, end: int | None = None) -> FastWeightsConfig:
        """Make the model's configuration.

        Args:
            vocabulary: Number of tokens.
            end: The token that ends a text.

        Raises:
            ValueError: If sizes do not fit each other.
        """
        return FastWeightsConfig(
            vocab_size=vocabulary,
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            mixers=[dict(mixer) for mixer in self.mixers],
            eos_token_id=end,
        )

    @property
    def name(self) -> str:
        return "-".join(str(mixer["name"]) for mixer in self.mixers)

    @property
    def title(self) -> str:
        mixers = ", ".join(str(mixer["name"]) for mixer in self.mixers)
        return f"{mixers}: {self.layers} layers of width {self.width}"


@dataclass(frozen=True)
class PresetArchitecture:
    """The architecture ``fastweights.PRESETS[name]``, with the tokenizer's vocabulary.

    Attributes:
        name: Name of the preset.
    """

    name: str

    def build(self, tokenizer: PreTrainedTokenizerBase) -> FastWeightsForCausalLM:
        """Build a new model for `tokenizer`.

        Raises:
            ValueError: If there is no preset of this name, or it is a classifier.
        """
        end = cast(int | None, tokenizer.eos_token_id)
        return FastWeightsForCausalLM(self.config(len(tokenizer), end))

    def config(self, vocabulary: int = 1, end: int | None = None) -> FastWeightsConfig:
        """Make the model's configuration.

        Args:
            vocabulary: Number of tokens.
            end: The token that ends a text.

        Raises:
            ValueError: If there is no preset of this name, or it is a classifier.
        """
        found = find_preset(self.name)
        if found.model is not FastWeightsForCausalLM:
            raise ValueError(
                f"{self.name} is a {found.model.__name__}; training takes language models"
            )
        return found.config(vocab_size=vocabulary, eos_token_id=end)

    @property
    def title(self) -> str:
        return self.name


@dataclass(frozen=True)
class HuggingFace:
    """An architecture of the transformers library, such as a softmax model to linearize later.

    Attributes:
        name: Its model_type, such as ``"llama"``.
        fields: Fields of its configuration; vocabulary and end of text are the tokenizer's.
    """

    name: str
    fields: Mapping[str, object] = field(default_factory=dict)

    def build(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        """Build a new model for `tokenizer`.

        Raises:
            ValueError: If transformers refuses the name or the fields.
        """
        end = cast(int | None, tokenizer.eos_token_id)
        special = {"bos_token_id": end, "eos_token_id": end, "pad_token_id": None}
        config = AutoConfig.for_model(
            self.name, **{"vocab_size": len(tokenizer), **special, **self.fields}
        )
        return AutoModelForCausalLM.from_config(config)

    @property
    def title(self) -> str:
        return f"{self.name}: " + ", ".join(
            f"{name} {value}" for name, value in self.fields.items()
        )


@dataclass(frozen=True)
class TrainConfig(Optimization):
    """Everything that decides the curve of a training run.

    The same value on the same machine gives the same weights.

    Attributes:
        text: The text to train on, and its tokenizer.
        model: The architecture of the model.
        length: Tokens per sequence.
    """

    text: Text = Text()
    model: Architecture | PresetArchitecture | HuggingFace = Architecture()
    length: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        POSITIVE_INTEGER.require(length=self.length)


def train(
    config: TrainConfig,
    out: Path,
    *,
    cpu: bool = False,
    reporter: Reporter = Reporter(),
    stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Train a language model in the folder `out`, or resume the training that was stopped or killed
    there.

    out/model is the result, a plain Hugging Face folder; out/metrics.jsonl and out/curves.png are
    its curve. PyTorch's generators are seeded.

    Args:
        config: What to train, and how.
        out: The run's folder, new or of this same run.
        cpu: Whether to use the CPU even if there is an accelerator.
        reporter: Receives progress events.
        stop: Called between steps; once it returns True, a checkpoint is written and training ends.

    Raises:
        DataError: If the text cannot be read or is too short.
        CheckpointError: If `out` holds another run, or is damaged.
        NonFiniteError: If a loss or gradient becomes infinite or NaN.
        ValueError: If the model cannot be built.
    """
    processes = join_processes(torch.device("cpu") if cpu else None)
    if isinstance(config.model, Architecture | PresetArchitecture):
        require_memory_to_train(config.model.config(), config, config.length, processes)
    with processes.first_then_others():
        stage = LanguageModelStage(config, out, processes.device)
    end = run_in_folder(stage, config, out, processes=processes, reporter=reporter, stop=stop)
    return _result(end, config, out, stage.corpus.tokens_per_byte)


def _result(end: End, config: TrainConfig, out: Path, tokens_per_byte: float) -> Result:
    nats = next((row["val_loss"] for row in reversed(end.rows) if "val_loss" in row), None)
    per_byte = None if nats is None else nats * tokens_per_byte
    return Result(out, end.step, config.steps, nats, per_byte)


class LanguageModelStage(StoredStage):
    """The training of a language model on windows of a text.

    ``val_loss`` is the loss of the next token, in nats. Wrong arguments are found before anything
    is written to `out`.
    """

    def __init__(self, config: TrainConfig, out: Path, device: torch.device) -> None:
        data = out / "data"
        kept = is_run(out, config) and data.exists()
        self.config, self.tokens_per_sequence = config, config.length
        self.corpus = load_corpus(data) if kept else read_corpus(config.text)
        self.windows = Windows(self.corpus.train, config.length, config.seed)
        torch.manual_seed(config.seed)
        self.model: Any = config.model.build(self.corpus.tokenizer).to(device)  # type: ignore[arg-type]

    def prepare(self, out: Path) -> None:
        record_numerics(out)
        if not (out / "data").exists():
            self.corpus = self.corpus.save(out / "data")

    def backward(self, first: int, count: int, share: float, step: int) -> Mapping[str, Tensor]:
        tokens = self.windows.batch(first, count).to(self.model.device)
        loss = self.model(input_ids=tokens, labels=tokens).loss
        go_backward(loss / self.config.accumulate)
        return {"loss": loss.detach()}

    def validate(self, processes: Processes = Alone()) -> Mapping[str, float]:
        nats = targets = 0.0
        batches = sequential_windows(
            self.corpus.validation, self.config.length, self.config.sequences_at_once(processes)
        )
        with evaluation_mode(self.model):
            for batch in processes.share(batches):
                tokens, count = batch.to(self.model.device), batch[:, 1:].numel()
                nats += count * float(self.model(input_ids=tokens, labels=tokens).loss)
                targets += count
        found = processes.total({"nats": nats, "targets": targets})
        return {"val_loss": found["nats"] / found["targets"]}

    def summary(self) -> Mapping[str, int]:
        return {
            "vocabulary": len(self.corpus.tokenizer),
            "train_tokens": len(self.corpus.train),
            "validation_tokens": len(self.corpus.validation),
        }

    def save(self, folder: Path) -> None:
        save_model(self.model, self.corpus.tokenizer, folder)

    def load(self, folder: Path) -> None:
        with no_progress_bars():
            self.model = type(self.model).from_pretrained(folder).to(self.model.device)
        for parameter in self.model.parameters():
            # torch aligns its own memory, a file's lies anywhere; sums depend on the alignment
            parameter.data = parameter.data.clone()

    def finish(self, out: Path) -> None:
        if not (out / "model").exists():
            with atomic_folder(out / "model") as folder:
                self.save(folder)

    def draw(self, rows: Sequence[Row], out: Path) -> None:
        plot(rows, out / "curves.png", self.config.model.title)
