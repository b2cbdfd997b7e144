"""Plan, convert, transfer, rank, finetune, evaluate, report, export: a run that goes on where it
was stopped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

from fastweights.linearize.convert.attach import branches, linearize
from fastweights.linearize.convert.modes import OtherRecurrence, Student, require_window, use_mode
from fastweights.linearize.distill.adapt import (
    load_adapters,
    merge_adapters,
    next_logits,
    prepare_adaptation,
    require_package,
    teacher_logits,
)
from fastweights.linearize.distill.baselines import (
    AdaptationConfig,
    LinearizationMethod,
    TransferConfig,
)
from fastweights.linearize.distill.blocks import transfer_blockwise
from fastweights.linearize.distill.fit import Fit, PartialStage, copy_parameters, fit
from fastweights.linearize.distill.judge import (
    LINEAR,
    Comparison,
    ablations,
    compare_with_softmax,
    distances,
)
from fastweights.linearize.distill.plan import ConversionPlan, plan
from fastweights.linearize.distill.ranking import damage_by_layer, most_damaging_layers
from fastweights.linearize.distill.report import write_report
from fastweights.linearize.distill.stages import AdaptStage, TransferStage
from fastweights.recurrence import Recurrence
from fastweights.runs.checkpoint import no_progress_bars, save_model
from fastweights.runs.evaluation import evaluation_mode
from fastweights.runs.files import atomic_file, atomic_folder, remove_partials
from fastweights.runs.folder import create_run, is_run, lock_run
from fastweights.runs.processes import join_processes
from fastweights.runs.report import Reporter
from fastweights.text.documents import Data, Sequences, Stream, read_sequences

VERBS = ("plan", "convert", "transfer", "rank-layers", "finetune", "eval", "report", "export")
"""The stages in their order."""
TOGETHER = ("transfer", "finetune")
"""Those in which all processes share the work; of the others the first one writes the results, and
the rest find them.
"""
COMPARISON_SEQUENCES = 16
"""Sequences of validation text that layers are ranked and measured by, at most."""


@dataclass(frozen=True)
class Conversion:
    """Everything that decides the result of a run.

    Attributes:
        model: folder or name on the hub
        layers: those to convert; None for all that can be
        softmax_layers: how many of them stay softmax after all: those that do the most damage
        dtype: of the model's own weights, such as "bfloat16"; "auto": as they are
        seed: of the order of the text
        bits: 4 or 8: of the frozen weights while the rest is trained (bitsandbytes); None: as
            in `dtype`. The result has its weights in `dtype` all the same.
    """

    model: str
    data: Data
    method: LinearizationMethod = LinearizationMethod()
    layers: tuple[int, ...] | None = None
    softmax_layers: int = 0
    dtype: str = "auto"
    seed: int = 0
    bits: int | None = None

    def __post_init__(self) -> None:
        if self.bits not in (None, 4, 8):
            raise ValueError(
                f"bits={self.bits}: the frozen weights have 4 or 8, or None to leave them as"
                " they are"
            )
        if self.bits is not None and _all_weights(self.method.adapt):
            raise ValueError(
                f"bits={self.bits} with a method that adapts all weights: quantised ones are not"
                " trained"
            )


def run_conversion(
    conversion: Conversion,
    out: Path,
    *,
    until: str = "export",
    device: torch.device | None = None,
    reporter: Reporter = Reporter(),
    stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Convert in the folder `out`, or go on in it, up to and with stage `until`; whether that is
    reached.

    out/model is the result, a folder that ``AutoModelForCausalLM.from_pretrained`` reads,
    out/adapter what it takes to make it from the softmax model, out/report/report.html the report,
    and the JSON files beside them its numbers. When `stop()` turns true the step is finished and a
    checkpoint written. Raises CannotLinearize, DataError, CheckpointError (`out` holds another run,
    or damage), NonFiniteError, or ValueError for LoRA without peft, and for bits without
    bitsandbytes or, if they are 4, a GPU.
    """
    verbs, adapting = VERBS[: VERBS.index(until) + 1], conversion.method.adapt
    if "finetune" in verbs and adapting is not None and adapting.lora is not None:
        require_package("peft", "LoRA", "or take 0 steps of finetuning")
    device = device or torch.device("cpu")
    if conversion.bits is not None:
        _require_bits(conversion.bits, device)
    with ExitStack() as held:
        work = _ConversionRun(conversion, out, device, reporter, stop, held)
        return all(not work.processes.any(stop()) and work.do(verb) for verb in verbs)


class FullWindow(OtherRecurrence):
    """`WindowedLinear` with a window over all tokens: what a right conversion cannot be told from
    softmax by.
    """

    def replacement(self, record: Recurrence) -> Recurrence:
        return replace(require_window(record, self), window=len(record))


class _ConversionRun:
    """The state of a run between two stages."""

    def __init__(
        self,
        conversion: Conversion,
        out: Path,
        device: torch.device,
        reporter: Reporter,
        stop: Callable[[], bool],
        held: ExitStack,
    ) -> None:
        self.conversion, self.out, self.stop = conversion, out, stop
        self.processes = join_processes(device)
        self.device = self.processes.device
        self.reporter = reporter if self.processes.is_first else Reporter()
        with self.processes.first_then_others():
            self.plan: ConversionPlan = self._plan(is_run(out, conversion))
            if self.processes.is_first:
                held.enter_context(lock_run(out))
                remove_partials(out)

    def _plan(self, ours: bool) -> ConversionPlan:
        """Before anything is written, so that a model that cannot be converted leaves nothing
        behind.
        """
        conversion, method = self.conversion, self.conversion.method
        found = plan(
            conversion.model, method, layers=conversion.layers, length=conversion.data.length
        )
        if not ours:
            create_run(self.out, conversion)
        return found

    def do(self, verb: str) -> bool:
        """One stage; False if it was stopped."""
        stages: dict[str, Callable[[], bool]] = {
            "plan": self._write_plan,
            "convert": self._convert,
            "transfer": self._transfer,
            "rank-layers": self._rank,
            "finetune": self._finetune,
            "eval": self._evaluate,
            "report": self._report,
            "export": self._export,
        }
        self.reporter.note(f"── {verb}")
        if verb in TOGETHER:
            return stages[verb]()
        with self.processes.first_then_others():
            return stages[verb]()

    def _write_plan(self) -> bool:
        return self._write("plan", {**asdict(self.plan), "break_even": self.plan.break_even})

    def _convert(self) -> bool:
        """The self-test, and what the swap alone costs."""
        if not self._has("convert"):
            batch = next(self.validation.sequential_batches(1))
            given = {name: x.to(self.device) for name, x in batch.items() if name != "labels"}
            test = {}
            if self.conversion.method.analog.rule == "windowed":
                test = {"largest_difference": _difference(self.model, given)}
            self._write("convert", {**test, **self._branches_alone()})
        return True

    def _transfer(self) -> bool:
        settings = self.conversion.method.transfer
        if settings is None or self._adapting:
            return True
        if not self._run_transfer(settings):
            return False
        with self.processes.first_then_others():
            if not self._has("transfer"):
                self._write("transfer", self._branches_alone())
        return True

    def _run_transfer(self, settings: TransferConfig) -> bool:
        folder = self.out / "transfer"
        if settings.blockwise:
            return transfer_blockwise(
                self.model,
                self.train,
                settings,
                folder,
                processes=self.processes,
                reporter=self.reporter,
                stop=self.stop,
            )
        stage = TransferStage(
            self.model, self.train, self.validation, settings.loss, settings.dropout
        )
        return self._fit(stage, settings.fit, folder)

    def _fit(self, stage: PartialStage, config: Fit, folder: Path) -> bool:
        return fit(
            stage,
            config,
            folder,
            processes=self.processes,
            reporter=self.reporter,
            stop=self.stop,
        )

    def _branches_alone(self) -> dict[str, Any]:
        """The model before stage two: how well it predicts, and how far its layers are from
        softmax.
        """
        batches = [
            batch
            for _, batch in zip(
                range(COMPARISON_SEQUENCES), self.validation.sequential_batches(1), strict=False
            )
        ]
        return {LINEAR: self._compare()[LINEAR].row(), **distances(self.model, batches)}

    def _rank(self) -> bool:
        """Damage by layer, and the model whose worst layers are softmax again."""
        kept = self.conversion.softmax_layers
        if not self._has("ranking"):
            batches = [
                batch
                for _, batch in zip(
                    range(COMPARISON_SEQUENCES), self.validation.sequential_batches(1), strict=False
                )
            ]
            found = damage_by_layer(
                self.model, [{name: x.to(self.device) for name, x in b.items()} for b in batches]
            )
            self._write("ranking", {"damage": found, "softmax": most_damaging_layers(found, kept)})
        if kept and not self._adapting:
            softmax = self._read("ranking")["softmax"]
            layers = [layer for layer in branches(self.model) if layer not in softmax]
            self.model = self._convert_again(layers, self.conversion.bits)
        return True

    def _finetune(self) -> bool:
        adapting = self.conversion.method.adapt
        if adapting is not None and not self._adapting:
            self.model = prepare_adaptation(self.model, adapting.lora, adapting.branches)
            self._adapting = True
            stage = AdaptStage(self.model, self.train, self.validation, adapting.loss)
            return self._fit(stage, adapting.fit, self.out / "finetune")
        return True

    _adapting = False

    def _export(self) -> bool:
        """The whole model, its adapters merged: the last stage, since they can no more be switched
        off then.
        """
        if not (self.out / "model").exists():
            if self._adapting and not _all_weights(self.conversion.method.adapt):
                with atomic_folder(self.out / "adapter") as folder:
                    self.model.save_pretrained(folder)
            self.model = self._merge_all()
            with no_progress_bars(), atomic_folder(self.out / "model") as folder:
                save_model(self.model, self.tokenizer, folder)
        return True

    def _merge_all(self) -> Any:
        """The model with its adapters merged, in weights that were not quantised."""
        if self.conversion.bits is None:
            return merge_adapters(self.model)
        layers = list(branches(self.model))
        if self._adapting:
            return merge_adapters(
                load_adapters(self._linearize_original(layers, None), self.out / "adapter")
            )
        return self._convert_again(layers, None)

    def _evaluate(self) -> bool:
        if not self._has("evaluation"):
            found = self._compare(ablations(self.model))
            for name, judged in found.items():
                self.out.joinpath("positions").mkdir(exist_ok=True)
                judged.loss.save(self.out / "positions" / f"{name}.json")
            self._write("evaluation", {name: judged.row() for name, judged in found.items()})
        return True

    def _report(self) -> bool:
        if not (self.out / "report" / "report.html").exists():
            with atomic_folder(self.out / "report") as folder:
                write_report(
                    self.model, next(self.validation.sequential_batches(1)), self.out, folder
                )
        return True

    @cached_property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.conversion.model)

    @cached_property
    def _text(self) -> tuple[Sequences, Sequences]:
        folders = self.out / "data" / "train", self.out / "data" / "validation"
        if not folders[1].exists():
            for folder, part in zip(
                folders, read_sequences(self.conversion.data, self.tokenizer), strict=True
            ):
                part.save(folder)
        train, validation = (Sequences.load(folder) for folder in folders)
        return train, validation

    @property
    def train(self) -> Stream:
        data = self.conversion.data
        return Stream(
            self._text[0], data.length, self.conversion.seed, data.responses, data.boundaries
        )

    @property
    def validation(self) -> Stream:
        data = self.conversion.data
        return Stream(
            self._text[1], min(data.length, len(self._text[1])), 0, data.responses, data.boundaries
        )

    @cached_property
    def model(self) -> Any:
        return self._linearize_original(self.conversion.layers, self.conversion.bits)

    def _convert_again(self, layers: Any, bits: int | None) -> Any:
        """A model with these layers converted, its branches as they have been trained."""
        trained = {
            name: x.detach().clone()
            for name, x in self.model.named_parameters()
            if "linear_branch" in name
        }
        model = self._linearize_original(layers, bits)
        copy_parameters(model, trained)
        return model

    def _linearize_original(self, layers: Any, bits: int | None) -> Any:
        torch.manual_seed(self.conversion.seed)
        return linearize(self._original(bits), self.conversion.method.analog, layers)

    def _original(self, bits: int | None = None) -> Any:
        options: dict[str, Any] = {"dtype": self.conversion.dtype}
        if bits is not None:
            options["quantization_config"] = BitsAndBytesConfig(
                load_in_4bit=bits == 4, load_in_8bit=bits == 8
            )
            options["device_map"] = {"": self.device}
        with no_progress_bars():
            model: Any = AutoModelForCausalLM.from_pretrained(self.conversion.model, **options)
        return model if bits is not None else model.to(self.device)

    def _compare(self, modes: Mapping[str, Any] | None = None) -> dict[str, Comparison]:
        teacher = (
            self._kept_teacher
            if self._adapting and _all_weights(self.conversion.method.adapt)
            else None
        )
        return compare_with_softmax(
            self.model, self.validation.sequential_batches(4), modes or {LINEAR: Student()}, teacher
        )

    @cached_property
    def _kept_teacher(self) -> Callable[[Mapping[str, Tensor]], Tensor]:
        """The model as it was, where all its weights have changed."""
        original = self._original().eval()
        return torch.no_grad()(lambda given: next_logits(original, given))

    def _has(self, name: str) -> bool:
        return (self.out / f"{name}.json").exists()

    def _read(self, name: str) -> Any:
        return json.loads((self.out / f"{name}.json").read_text())

    def _write(self, name: str, content: Mapping[str, Any]) -> bool:
        with atomic_file(self.out / f"{name}.json") as new:
            new.write_text(json.dumps(content, indent=1))
        return True


def _require_bits(bits: int, device: torch.device) -> None:
    require_package("bitsandbytes", f"bits={bits}", "or leave the weights as they are")
    if bits == 4 and device.type == "cpu":
        raise ValueError(
            "bits=4 on a CPU: bitsandbytes passes no gradients through such weights there; take"
            " bits=8"
        )


def _all_weights(adapting: AdaptationConfig | None) -> bool:
    return adapting is not None and adapting.lora is None


@torch.no_grad()
def _difference(model: Any, given: Mapping[str, Tensor]) -> float:
    """Largest difference of a logit to softmax's with a window over the whole text, over the
    largest logit.
    """
    with evaluation_mode(model):
        wanted = teacher_logits(model, given)
        with use_mode(model, FullWindow()):
            found = next_logits(model, given)
    return float((found - wanted).abs().max() / wanted.abs().max())
