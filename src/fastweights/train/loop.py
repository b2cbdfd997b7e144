"""Training a language model on text, such that it can be killed at any moment and go on to the same
end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import cast

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM, find_preset
from fastweights.runs.checkpoint import Checkpoints, Progress, save_model
from fastweights.runs.errors import NonFiniteError, TrainingError
from fastweights.runs.files import atomic_folder, remove_partials
from fastweights.runs.folder import TrainingClock, create_run, is_run, lock_run, random_seed_from
from fastweights.runs.metrics import Metrics
from fastweights.runs.optimizers import (
    AdamW,
    Cosine,
    OptimizerConfig,
    Schedule,
    load_state_tensors,
    set_learning_rates,
    state_tensors,
)
from fastweights.runs.report import Reporter, Result, Summary
from fastweights.text.corpus import Text, Windows, load_corpus, read_corpus, sequential_windows
from fastweights.train.plot import plot


@dataclass(frozen=True)
class Architecture:
    """A language model: `mixers`, ``{"name": …, …arguments}`` each, repeated over `layers` blocks
    of width `width`.
    """

    mixers: tuple[Mapping[str, object], ...] = ({"name": "metala"},)
    layers: int = 4
    width: int = 128

    def build(self, tokenizer: PreTrainedTokenizerBase) -> FastWeightsForCausalLM:
        """A new model for this tokenizer. Raises ValueError for sizes that do not fit each
        other.
        """
        config = FastWeightsConfig(
            vocab_size=len(tokenizer),
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            mixers=[dict(mixer) for mixer in self.mixers],
            eos_token_id=cast(int | None, tokenizer.eos_token_id),
        )
        return FastWeightsForCausalLM(config)

    @property
    def name(self) -> str:
        return "-".join(str(mixer["name"]) for mixer in self.mixers)

    @property
    def title(self) -> str:
        mixers = ", ".join(str(mixer["name"]) for mixer in self.mixers)
        return f"{mixers}: {self.layers} layers of width {self.width}"


@dataclass(frozen=True)
class PresetArchitecture:
    """The language model of ``fastweights.PRESETS[name]``, with the tokenizer's vocabulary."""

    name: str

    def build(self, tokenizer: PreTrainedTokenizerBase) -> FastWeightsForCausalLM:
        """A new model for this tokenizer. Raises ValueError for a name of no preset, or of a
        classifier.
        """
        found = find_preset(self.name)
        if found.model is not FastWeightsForCausalLM:
            raise ValueError(
                f"{self.name} is a {found.model.__name__}; training takes language models"
            )
        end = cast(int | None, tokenizer.eos_token_id)
        return FastWeightsForCausalLM(found.config(vocab_size=len(tokenizer), eos_token_id=end))

    @property
    def title(self) -> str:
        return self.name


@dataclass(frozen=True)
class HuggingFace:
    """A new language model of another architecture that transformers has, such as a softmax one to
    linearize.

    Attributes:
        name: its model_type, such as ``"llama"``
        fields: of its configuration; the vocabulary and the end of text are the tokenizer's
    """

    name: str
    fields: Mapping[str, object] = field(default_factory=dict)

    def build(self, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
        """A new model for this tokenizer. Raises ValueError for a name or fields that transformers
        refuses.
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
class Every:
    """How often, in steps, to write a line of metrics, to evaluate, and to save a checkpoint."""

    log: int = 10
    evaluation: int = 100
    checkpoint: int = 100


@dataclass(frozen=True)
class TrainConfig:
    """Everything that decides the curve of a run; the same value on the same machine gives the same
    weights.

    Attributes:
        batch: sequences per update, over all devices
        length: tokens per sequence
        accumulate: parts in which each device takes its share of a batch, to save memory
        clip: largest norm of the gradient
        bf16: whether matrix products are in bfloat16 (parameters stay float32)
    """

    text: Text = Text()
    model: Architecture | PresetArchitecture | HuggingFace = Architecture()
    optimizer: OptimizerConfig = AdamW()
    schedule: Schedule = Cosine()
    every: Every = Every()
    steps: int = 1000
    batch: int = 16
    length: int = 256
    accumulate: int = 1
    clip: float = 1.0
    bf16: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        counts = {name: getattr(self, name) for name in ("steps", "batch", "length", "accumulate")}
        counts |= {
            f"every.{field.name}": getattr(self.every, field.name) for field in fields(self.every)
        }
        for name, count in counts.items():
            if count < 1:
                raise TrainingError(f"{name} = {count}; it must be 1 or more")


def train(
    config: TrainConfig,
    out: Path,
    *,
    cpu: bool = False,
    reporter: Reporter = Reporter(),
    stop: Callable[[], bool] = lambda: False,
) -> Result:
    """Train in the folder `out`, or go on where training in it was stopped or killed; seeds
    PyTorch's generators.

    out/model is the result, a plain Hugging Face folder; out/metrics.jsonl and out/curves.png are
    its curve. With `cpu` no accelerator is used. When `stop()` turns true the step is finished and
    a checkpoint written. Raises DataError, CheckpointError (`out` holds another run, or damage),
    NonFiniteError, or the model's errors.
    """
    accelerator = Accelerator(cpu=cpu)
    reporter = reporter if accelerator.is_main_process else Reporter()
    with ExitStack() as held:
        run = _Run(config, out, accelerator, reporter, held)
        while run.progress.step < config.steps and not _any_process_wants(accelerator, stop()):
            run.advance()
        return run.finish()


class _Run:
    """The state of a run between two steps; `held` keeps other processes out of its folder."""

    def __init__(
        self,
        config: TrainConfig,
        out: Path,
        accelerator: Accelerator,
        reporter: Reporter,
        held: ExitStack,
    ) -> None:
        self.config, self.out, self.accelerator, self.reporter = config, out, accelerator, reporter
        share = accelerator.num_processes * config.accumulate
        if config.batch % share:
            raise TrainingError(
                f"batch = {config.batch} is not divisible by devices · accumulate = {share}"
            )
        self.part = config.batch // share
        with accelerator.main_process_first():
            self._open(held)
        model = self.model.to(accelerator.device)
        optimizers = config.optimizer.build(model)
        set_learning_rates(optimizers, 1.0)
        if self.checkpoint is not None:
            load_state_tensors(optimizers, model, self.checkpoint.optimizer())
        self.wrapped, *self.optimizers = accelerator.prepare(model, *optimizers)
        self.clock = TrainingClock(self.progress)
        self._introduce()

    def _open(self, held: ExitStack) -> None:
        """Everything that can be wrong with the arguments is found before anything is written."""
        config, data = self.config, self.out / "data"
        ours = is_run(self.out, config)
        corpus = load_corpus(data) if ours and data.exists() else read_corpus(config.text)
        self.windows = Windows(corpus.train, config.length, config.seed)
        torch.manual_seed(config.seed)
        self.model: PreTrainedModel = config.model.build(corpus.tokenizer)
        if not ours:
            create_run(self.out, config)
        if self.accelerator.is_main_process:
            held.enter_context(lock_run(self.out))
        remove_partials(self.out)
        self.corpus = corpus if data.exists() else corpus.save(data)
        self._continue()

    def _continue(self) -> None:
        """Take up the newest checkpoint, if there is one."""
        self.checkpoints = Checkpoints(self.out / "checkpoints")
        self.checkpoint = self.checkpoints.latest(self.reporter.note)
        self.progress = Progress() if self.checkpoint is None else self.checkpoint.progress
        self.metrics = Metrics(self.out / "metrics.jsonl", self.progress.step)
        if self.accelerator.is_main_process:
            self.metrics.cut()
        if self.checkpoint is not None:
            self.model = self.checkpoint.model(type(self.model))

    def _introduce(self) -> None:
        summary = Summary(
            out=self.out,
            device=str(self.accelerator.device),
            parameters=sum(p.numel() for p in self.model.parameters()),
            vocabulary=len(self.corpus.tokenizer),
            train_tokens=len(self.corpus.train),
            validation_tokens=len(self.corpus.validation),
            tokens_per_step=self.config.batch * self.config.length,
            step=self.progress.step,
            steps=self.config.steps,
        )
        self.reporter.begin(summary)

    def advance(self) -> None:
        """One update, and what is due after it."""
        step, every = self.progress.step + 1, self.config.every
        last = step == self.config.steps
        self._update(step - 1)
        self.progress = Progress(step, self.clock.seconds)
        evaluate, save = last or step % every.evaluation == 0, last or step % every.checkpoint == 0
        log = evaluate or step == 1 or step % every.log == 0
        if log:
            self._log(evaluate)
        if save:
            self._save()
        if log or save:
            self.clock.restart(step)

    def finish(self) -> Result:
        """Save what is not saved yet; the model, if the run is complete."""
        step, steps = self.progress.step, self.config.steps
        if step > 0 and not self.checkpoints.has(step):
            self._save()
        if step == steps and self.accelerator.is_main_process:
            self._finish()
        nats = next(
            (row["val_loss"] for row in reversed(self.metrics.rows) if "val_loss" in row), None
        )
        return Result(
            self.out,
            step,
            steps,
            nats,
            None if nats is None else nats * self.corpus.tokens_per_byte,
        )

    def _update(self, step: int) -> None:
        config, accelerator = self.config, self.accelerator
        torch.manual_seed(random_seed_from(config.seed, step, accelerator.process_index))
        set_learning_rates(self.optimizers, config.schedule.factor(step, config.steps))
        self.wrapped.train()
        losses = [self._backward(step, part) for part in range(config.accumulate)]
        self.loss = torch.stack(losses).sum()
        self.norm = torch.as_tensor(
            accelerator.clip_grad_norm_(self.wrapped.parameters(), config.clip)
        )
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def _backward(self, step: int, part: int) -> Tensor:
        """Add a part's gradient; its share of the loss. Devices exchange gradients after the last
        part only.
        """
        config, accelerator = self.config, self.accelerator
        index = accelerator.process_index * config.accumulate + part
        tokens = self.windows.batch(step * config.batch + index * self.part, self.part).to(
            accelerator.device
        )
        last = part == config.accumulate - 1
        with nullcontext() if last else accelerator.no_sync(self.wrapped):
            with self._precision():
                loss = self.wrapped(input_ids=tokens, labels=tokens).loss / config.accumulate
            accelerator.backward(loss)
        return loss.detach()

    def _precision(self) -> AbstractContextManager[object]:
        """Not the Accelerator's, which one process can set only once."""
        return torch.autocast(
            self.accelerator.device.type, torch.bfloat16, enabled=self.config.bf16
        )

    def _log(self, evaluate: bool) -> None:
        row = {
            "step": self.progress.step,
            "loss": self._sound_loss(),
            "lr": self.optimizers[0].param_groups[0]["lr"],
        }
        row |= {
            "tokens_per_second": round(
                self.clock.steps_per_second(self.progress.step)
                * self.config.batch
                * self.config.length
            )
        }
        row |= {"seconds": round(self.clock.seconds, 3)}
        row |= {"val_loss": self._evaluate()} if evaluate else {}
        if not self.accelerator.is_main_process:
            return
        self.metrics.append(row)
        if evaluate:
            plot(self.metrics.rows, self.out / "curves.png", self.config.model.title)
        self.reporter.progress(row)

    def _sound_loss(self) -> float:
        """The loss of the last update, nats per token. Raises NonFiniteError."""
        loss = float(torch.as_tensor(self.accelerator.reduce(self.loss, "mean")))
        if not (math.isfinite(loss) and math.isfinite(float(self.norm))):
            raise NonFiniteError(
                f"loss {loss}, gradient norm {float(self.norm)} by step {self.progress.step}; the"
                " checkpoints before are untouched; try a lower learning rate, a longer warm-up,"
                " or float32 in place of bf16"
            )
        return loss

    @torch.no_grad()
    def _evaluate(self) -> float:
        """Mean loss over the validation tokens, nats per token."""
        model, device = self.plain.eval(), self.accelerator.device
        total = torch.zeros(2, dtype=torch.float64, device=device)
        batches = sequential_windows(self.corpus.validation, self.config.length, self.part)
        for tokens in islice(
            batches, self.accelerator.process_index, None, self.accelerator.num_processes
        ):
            targets = tokens[:, 1:].numel()
            with self._precision():
                loss = model(input_ids=tokens.to(device), labels=tokens.to(device)).loss
            total += torch.stack(
                [loss.double() * targets, loss.new_tensor(targets, dtype=torch.float64)]
            )
        nats, targets = torch.as_tensor(self.accelerator.reduce(total, "sum")).tolist()
        return nats / targets

    def _save(self) -> None:
        self._sound_loss()
        if self.accelerator.is_main_process:
            state = state_tensors(
                [optimizer.optimizer for optimizer in self.optimizers], self.plain
            )
            self.checkpoints.save(self.progress, self.plain, self.corpus.tokenizer, state)
        self.accelerator.wait_for_everyone()

    def _finish(self) -> None:
        if not (self.out / "model").exists():
            with atomic_folder(self.out / "model") as folder:
                save_model(self.plain, self.corpus.tokenizer, folder)
        plot(self.metrics.rows, self.out / "curves.png", self.config.model.title)

    @property
    def plain(self) -> PreTrainedModel:
        """The model without what Accelerate wraps around it."""
        return self.accelerator.unwrap_model(self.wrapped)


def _any_process_wants(accelerator: Accelerator, wish: bool) -> bool:
    """Whether any process wishes to stop."""
    if accelerator.num_processes == 1:
        return wish
    if wish:
        accelerator.set_trigger()
    return accelerator.check_trigger()
