"""Training of a language model on text that can be killed at any moment and resumed with the same
result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from fastweights.errors import Stopped, TrainingError
from fastweights.models.evaluation import evaluation_mode
from fastweights.ranges import NON_NEGATIVE_NUMBER, POSITIVE_INTEGER, SEQUENCE_LENGTH
from fastweights.training.data.corpus import Text, build_tokenizer
from fastweights.training.data.documents import Stream, count_learnt, to_device
from fastweights.training.data.folder import TextFolder
from fastweights.training.data.tokenizers import vocabulary_size
from fastweights.training.language.adapters import has_adapters, merge_adapters, restore_adapters
from fastweights.training.language.architectures import (
    Architecture,
    HuggingFace,
    OwnArchitecture,
    PresetArchitecture,
)
from fastweights.training.language.existing import ExistingModel, copy_to_own_memory
from fastweights.training.language.memory import require_memory_to_train
from fastweights.training.language.numerics import record_numerics
from fastweights.training.language.objective import make_objective
from fastweights.training.language.plot import plot
from fastweights.training.language.reading import BatchReading, SlicedReading
from fastweights.training.loop.checkpoint import no_progress_bars, save_model
from fastweights.training.loop.files import atomic_folder
from fastweights.training.loop.folder import is_run
from fastweights.training.loop.layout import Layout, is_part
from fastweights.training.loop.length import change_end
from fastweights.training.loop.loop import End, Session, run_in_folder
from fastweights.training.loop.metrics import Row
from fastweights.training.loop.processes import (
    PATIENCE,
    Alone,
    Processes,
    connected,
    join_processes,
)
from fastweights.training.loop.report import Counts, Reporter, Result
from fastweights.training.loop.stage import (
    Every,
    Optimization,
    StoredStage,
    go_backward,
    trainable_parameters,
)

__all__ = ["Every", "TrainConfig", "train"]

MODEL, ADAPTER = "model", "adapter"
"""The results of a run, by their folders."""


@dataclass(frozen=True)
class TrainConfig(Optimization):
    """Everything that decides the curve of a training run.

    The same value on the same machine gives the same weights.

    Attributes:
        text: The text to train on, and its tokenizer.
        model: The architecture of a new model, or the model to go on from.
        length: Tokens per sequence.
        z_loss: Weight of a z-loss, the mean of log² Z for the normaliser Z of a token's
            probabilities, which keeps logits from drifting (PaLM takes 1e-4); the curve has it
            apart, as ``z_loss``, and validation leaves it out. 0 for none.
    """

    text: Text = Text()
    model: Architecture | PresetArchitecture | HuggingFace | ExistingModel = Architecture()
    length: int = 256
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        POSITIVE_INTEGER.require(length=self.length)
        NON_NEGATIVE_NUMBER.require(z_loss=self.z_loss)
        self.text.require_blocks(self.length)


@connected()
def train(
    config: TrainConfig,
    out: Path,
    *,
    cpu: bool = False,
    layout: Layout = Layout(),
    reporter: Reporter = Reporter(),
    stop: Callable[[], bool] = lambda: False,
    patience: float = PATIENCE,
) -> Result:
    """Train a language model in the folder `out`, or resume the training that was stopped or killed
    there.

    out/model is the result, a plain Hugging Face folder, and out/adapter what LoRA adds to the
    model that it began from; out/metrics.jsonl and out/curves.png are its curve. PyTorch's
    generators are seeded. A run's `steps` and `schedule` may change as long as all updates made so
    far would have had the same learning rates: the result is that of a run which was asked for so
    at once.

    Args:
        config: What to train, and how.
        out: The run's folder, new or of this same run.
        cpu: Whether to use the CPU even if there is an accelerator.
        layout: How the model lies in the memory of the processes; no part of the run, so that it
            may be resumed under another one, and on another number of processes.
        reporter: Receives progress events.
        stop: Called between steps, and between batches of a validation; once it returns True, a
            checkpoint is written and training ends.
        patience: Seconds that one of several processes waits for another one.

    Raises:
        DataError: If the text cannot be read or is too short.
        CheckpointError: If `out` holds another run, or is damaged.
        NonFiniteError: If a loss or gradient becomes infinite or NaN.
        ValueError: If the model cannot be built.
    """
    processes = join_processes(torch.device("cpu") if cpu else None, patience)
    session = Session(processes=processes, layout=layout, reporter=reporter, stop=stop)
    processes.require_alike(layout)
    processes.read_together(layout.slices)
    if isinstance(config.model, OwnArchitecture):
        require_memory_to_train(config.model.config(), config, config.length, processes, layout)
    with processes.first_then_others():
        if processes.is_first:
            change_end(out, config, (MODEL, ADAPTER))
        stage = LanguageModelStage(config, out, session)
    try:
        end = run_in_folder(stage, config, out, session)
    except Stopped:
        return Result(out, 0, config.steps, None, None)
    return _result(end, config, out, stage.corpus.tokens_per_byte)


def _result(end: End, config: TrainConfig, out: Path, tokens_per_byte: float) -> Result:
    nats = next((row["val_loss"] for row in reversed(end.rows) if "val_loss" in row), None)
    per_byte = None if nats is None else nats * tokens_per_byte
    validated = end.is_complete or end.step < config.steps
    return Result(out, end.step, config.steps, nats, per_byte, validated)


class LanguageModelStage(StoredStage):
    """The training of a language model on windows of a text.

    ``val_loss`` is the loss of the next token, in nats, of a mixture the mean over its sources by
    their shares, and ``val_loss/NAME`` that of each source. Wrong arguments are found before
    anything is written to `out`.
    """

    calls_module = True
    results = (MODEL, ADAPTER)

    def __init__(
        self,
        config: TrainConfig,
        out: Path,
        session: Session = Session(),
    ) -> None:
        processes = session.processes
        if processes.is_first:  # it may be filling the folder while others get here
            is_run(out, config)
        SEQUENCE_LENGTH.require(length=config.length)
        self.config, self.tokens_per_sequence = config, config.length
        self.device, alone = processes.device, processes.together == 1
        self.reading = BatchReading() if alone else SlicedReading(processes)
        self.reading.require_length(config.length)
        # What is divided goes to an accelerator block by block.
        self._home = torch.device("cpu") if session.layout.shard else processes.device
        make_tokenizer = partial(build_tokenizer, config.text)
        text = TextFolder(out, config.text, config.length, make_tokenizer)
        self.tokenizer, self._open_text = (
            text.tokenizer,
            partial(text.open, processes.is_first, session.reporter, session.stop),
        )
        torch.manual_seed(config.seed)
        self.model: Any = config.model.build(self.tokenizer).to(self._home)  # type: ignore[arg-type]
        self.reading.require_model(self.model)
        _require_positions(self.model.config.get_text_config(), config.length)
        self._objective = make_objective(self.model, config.z_loss)

    def prepare(self, out: Path) -> None:
        record_numerics(out)
        self.corpus = self._open_text()
        length, seed, apart = self.config.length, self.config.seed, self.config.text.boundaries
        self._train = self.corpus.batches(length, seed, boundaries=apart)
        self._validation = {
            name: Stream(text, length, seed, boundaries=apart)
            for name, text in self.corpus.validations.items()
        }

    def backward(self, first: int, count: int, share: float, step: int) -> Mapping[str, Tensor]:
        batch = self._train.batch(first, count)
        if count_learnt(batch["labels"]) == 0:  # of no label a loss may be NaN
            batch, share = {**batch, "labels": batch["input_ids"]}, 0.0
        with self.reading.of(self.model):
            losses = self._objective(self.module, self._read(batch))
            total = torch.stack([*losses.values()]).sum() * self.reading.count
            go_backward(total * share)
        counted = self.reading.count * (share > 0)
        return {name: loss.detach() * counted for name, loss in losses.items()}

    def learnt(self, first: int, count: int) -> int:
        return self._train.learnt(first, count)

    def validate(self, processes: Processes = Alone()) -> Mapping[str, float]:
        with evaluation_mode(self.model), self.reading.of(self.model):
            losses = {
                name: self._mean_loss(stream, processes)
                for name, stream in self._validation.items()
            }
        return self.corpus.loss_metrics(losses)

    def _mean_loss(self, stream: Stream, processes: Processes) -> float:
        nats = targets = 0.0
        batches = stream.sequential_batches(self.config.sequences_at_once(processes))
        for batch, counts in processes.share(batches):
            count = counts * count_learnt(batch["labels"])
            loss = self.model(**self._read(batch)).loss
            nats += count * self.reading.count * float(loss) if count else 0.0
            targets += count
        found = processes.total({"nats": nats, "targets": targets})
        return found["nats"] / max(found["targets"], 1)

    def _read(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return self.reading.own_part(to_device(batch, self.device))

    def summary(self) -> Counts:
        return {
            "vocabulary": vocabulary_size(self.tokenizer),
            "train_tokens": self._train.tokens,
            "validation_tokens": len(self.corpus.validation),
        }

    def tensors(self) -> dict[str, Tensor]:
        if has_adapters(self.model):
            return {name: p.detach() for name, p in trainable_parameters(self.model).items()}
        return self.model.state_dict()

    def save(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        save_model(self.model, self.tokenizer, folder, tensors)

    def load(self, folder: Path) -> None:
        if has_adapters(self.model):
            restore_adapters(self.model, folder)
            return
        with no_progress_bars():
            self.model = type(self.model).from_pretrained(folder).to(self._home)
        copy_to_own_memory(self.model)

    def finish(self, out: Path, tensors: Mapping[str, Tensor]) -> None:
        if (out / MODEL).exists():
            return
        if not has_adapters(self.model):
            with atomic_folder(out / MODEL) as folder:
                self.save(folder, tensors)
            return
        with atomic_folder(out / ADAPTER) as folder:
            self.save(folder, tensors)
        with atomic_folder(out / MODEL) as folder:
            save_model(self._merge(out / ADAPTER), self.tokenizer, folder)

    def _merge(self, adapter: Path) -> PreTrainedModel:
        """The model with its adapters; a new one where this process has only parts of it."""
        if any(map(is_part, self.model.parameters())):
            self.model = self.config.model.build(self.tokenizer)  # type: ignore[arg-type]
            restore_adapters(self.model, adapter)
        return merge_adapters(self.model)

    def draw(self, rows: Sequence[Row], out: Path) -> None:
        plot(rows, out / "curves.png", self.config.model.title)


def _require_positions(config: PretrainedConfig, length: int) -> None:
    positions = getattr(config, "max_position_embeddings", None)
    if positions is not None and 0 < positions < length:
        raise TrainingError(
            f"length = {length}, but the model has positions for {positions} tokens; take a length"
            f" of {positions} or less"
        )
