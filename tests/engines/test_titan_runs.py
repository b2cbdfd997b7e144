"""Our models in torchtitan's trainer, beside a literal loop and our own."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any
from warnings import catch_warnings

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from fastweights import FastWeightsConfig, FastWeightsForCausalLM, preset
from fastweights.engines.titan.export import export
from fastweights.engines.titan.operations import training_operations
from fastweights.models.size import count_parameters
from fastweights.training.data.tokenizers import Bytes
from fastweights.training.loop.checkpoint import save_model
from fastweights.training.loop.loop import Loop
from fastweights.training.loop.optimizers import AdamW, matrices
from fastweights.training.loop.processes import Alone
from fastweights.training.loop.schedules import Constant
from fastweights.training.loop.stage import Optimization, Stage, go_backward
from titan_runs import Batch, Run, run_titan

pytestmark = pytest.mark.titan
pytest.importorskip("torchtitan")
with catch_warnings(action="ignore"):  # PyTorch's own, of what torchtitan imports
    manager = import_module("torchtitan.config").ConfigManager
    titan = import_module("fastweights.engines.titan.specification")

STEPS, LENGTH = 5, 64
MIXERS = [
    {"name": "metala", "heads": 2},
    {"name": "gated_deltanet", "heads": 2},
    {"name": "softmax", "heads": 2},
]
MODELS = {
    "plain": {},
    "tied": {"tie_word_embeddings": True, "logit_cap": 30.0, "learnt_positions": LENGTH},
}
OPTIMIZER = AdamW(lr=4e-4)
WHOLE_CHECKPOINT = ("--checkpoint.no-last-save-in-hf", "--checkpoint.no-last-save-model-only")


@dataclass(frozen=True)
class Runs:
    """All runs of torchtitan here, by name, and the folder they began from."""

    folder: Path
    by_name: Mapping[str, Run]

    def start(self, kind: str) -> FastWeightsForCausalLM:
        return FastWeightsForCausalLM.from_pretrained(self.folder / kind).train()


def _begin(folder: Path) -> None:
    """Models, their tokenizer, a module of a user's own, and documents of many lengths."""
    words = Bytes().build([])
    for kind, fields in MODELS.items():
        torch.manual_seed(0)
        config = FastWeightsConfig(
            vocab_size=len(words),
            hidden_size=64,
            num_hidden_layers=3,
            mixers=MIXERS,
            **fields,  # type: ignore[arg-type]
        )
        save_model(FastWeightsForCausalLM(config), words, folder / kind)
    (folder / "text").mkdir()
    lines = (f"{n} sheep and {n * n % 9973} goats in {'a long ' * (n % 23)}row" for n in range(400))
    (folder / "text" / "part.jsonl").write_text("".join(f'{{"text": "{t}"}}\n' for t in lines))
    (folder / "mypkg_titan.py").write_text(OWN_MODULE.format(folder=folder))


OWN_MODULE = """
from torchtitan.components.loss import CrossEntropyLoss
from fastweights import FastWeightsConfig
from fastweights.engines.titan.specification import trainer_config

def whole_logits():
    config = trainer_config(FastWeightsConfig.from_pretrained("{folder}/tied"), flavour="own")
    config.hf_assets_path, config.loss = "{folder}/tied", CrossEntropyLoss.Config()
    return config
"""
TWO = {
    "sharded": ["plain"],
    "replicated": [
        "tied",
        *("--parallelism.data-parallel-replicate-degree", "2"),
        *("--parallelism.data-parallel-shard-degree", "1"),
    ],
    "tied-sharded": ["tied", "--parallelism.spmd-backend", "partial_dtensor"],
    "half": ["plain", "--training.steps", "3", *WHOLE_CHECKPOINT],
    "rest": ["plain", "--dump_folder", "half", *WHOLE_CHECKPOINT],
    "new-on-two": ["plain", "--checkpoint.no-enable"],
}
ONE = {
    "plain": ["plain"],
    "tied": ["tied"],
    "parts": [
        *("plain", "--training.local-batch-size", "2"),
        *("--validator.enable", "--validator.steps", "1", "--validator.freq", "2"),
        *("--validator.dataloader.dataset", "c4_test"),
        *("--validator.dataloader.dataset-path", "./text"),
    ],
    "compiled": [
        *("plain", "--compile.enable", "--compile.components", "model"),
        *("--compile.backend", "aot_eager", "--training.steps", "2"),
    ],
    "bfloat16": ["plain", "--training.mixed-precision-param", "bfloat16"],
    "recomputed": ["plain", "activation-checkpoint:full"],
    "kept": ["plain", "activation-checkpoint:none"],
    "new-alone": ["plain", "--checkpoint.no-enable"],
    "whole-logits": ["tied", "--module", "mypkg_titan", "--config", "whole_logits"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("titan")
    _begin(folder)
    return folder


@pytest.fixture(scope="module")
def runs(folder: Path) -> Runs:
    done: dict[str, Run] = {}
    for processes, cases in ((1, ONE), (2, TWO)):
        lists = {name: _arguments(folder, processes, *case) for name, case in cases.items()}
        done |= run_titan(folder, processes, lists)
    return Runs(folder, done)


def _arguments(folder: Path, processes: int, kind: str, *others: str) -> list[str]:
    return [
        *("--module", "fastweights.engines.titan", "--config", str(folder / kind)),
        *("--dataloader.dataset", "c4_test", "--dataloader.dataset-path", str(folder / "text")),
        *("--training.local-batch-size", str(8 // processes), "--training.global-batch-size", "8"),
        *("--training.seq-len", str(LENGTH), "--training.steps", str(STEPS)),
        *("--training.mixed-precision-param", "float32", "--debug.seed", "1"),
        *("--lr-scheduler.warmup-steps", "0", "--lr-scheduler.min-lr-factor", "1.0"),
        *("--checkpoint.enable", "--checkpoint.initial-load-in-hf", "--checkpoint.interval", "3"),
        *others,
    ]


class _Recorded(Stage):
    """The training of a model on the batches that torchtitan has read."""

    def __init__(self, model: FastWeightsForCausalLM, batches: list[Batch]) -> None:
        self.model, self.batches = model, batches
        self.losses: list[float] = []

    def backward(self, first: int, count: int, share: float, step: int) -> Mapping[str, Tensor]:
        batch = self.batches[first // count]
        loss = self.model(
            input_ids=batch["input"],
            position_ids=batch["positions"],
            targets=batch["labels"],
        ).loss
        go_backward(loss)
        self.losses.append(float(loss.detach()))
        return {"loss": loss.detach()}

    def validate(self, processes: Any = Alone()) -> Mapping[str, float]:
        return {"val_loss": self.losses[-1]}


def our_loop(model: FastWeightsForCausalLM, batches: list[Batch]) -> list[float]:
    stage = _Recorded(model, batches)
    settings = Optimization(
        steps=STEPS, batch=8, optimizer=OPTIMIZER, schedule=Constant(), clip=1.0
    )
    Loop(stage, settings, Alone()).run(lambda due: None)
    return stage.losses


def literal_loop(model: FastWeightsForCausalLM, batches: list[Batch]) -> list[float]:
    """Each document by itself, and AdamW as PyTorch has it."""
    (optimizer,) = OPTIMIZER.build(model)
    losses = []
    for batch in batches:
        loss = sum(
            F.cross_entropy(model(input_ids=tokens[None]).logits[0], labels, reduction="sum")
            for tokens, labels in _documents(batch)
        ) / int((batch["labels"] != -100).sum())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def _documents(batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
    for row in range(len(batch["input"])):
        starts = (batch["positions"][row] == 0).nonzero().flatten().tolist()
        for start, end in zip(starts, [*starts[1:], LENGTH], strict=True):
            yield batch["input"][row, start:end], batch["labels"][row, start:end]


def worst(model: FastWeightsForCausalLM, weights: Mapping[str, Tensor]) -> float:
    """The largest difference of a weight."""
    return max(
        float((weight - weights[f"language_model.{name}"]).abs().max())
        for name, weight in model.state_dict().items()
    )


@pytest.mark.parametrize("loop", [our_loop, literal_loop])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("plain", "plain"),
        ("tied", "tied"),
        ("sharded", "plain"),
        ("tied-sharded", "tied"),
        ("replicated", "tied"),
    ],
)
def test_losses_and_weights_equal_ours(runs: Runs, name: str, kind: str, loop: Any) -> None:
    run, model = runs.by_name[name], runs.start(kind)
    losses = loop(model, run.batches)
    assert losses == pytest.approx(run.losses, abs=1e-5)
    assert worst(model, run.last) < 2e-5


@pytest.mark.parametrize("name", ["parts", "recomputed", "kept", "compiled"])
def test_how_a_step_is_computed_changes_nothing(runs: Runs, name: str) -> None:
    losses = runs.by_name[name].losses
    assert losses == pytest.approx(runs.by_name["plain"].losses[: len(losses)], abs=1e-5)


def test_a_loss_of_all_logits_caps_them_too(runs: Runs) -> None:
    assert runs.by_name["whole-logits"].losses == pytest.approx(
        runs.by_name["tied"].losses, abs=1e-5
    )


def test_bfloat16_keeps_weights_in_float32(runs: Runs) -> None:
    run = runs.by_name["bfloat16"]
    assert run.losses == pytest.approx(runs.by_name["plain"].losses, abs=2e-2)
    assert run.losses != runs.by_name["plain"].losses
    assert {weight.dtype for weight in run.last.values()} == {torch.float32}


def test_a_run_goes_on_from_its_checkpoint(runs: Runs) -> None:
    half, rest = runs.by_name["half"], runs.by_name["rest"]
    whole = runs.by_name["sharded"]
    assert half.losses + rest.losses == whole.losses
    assert all(torch.equal(weight, whole.last[name]) for name, weight in rest.last.items())


def test_a_model_starts_alike_on_any_number_of_processes(runs: Runs) -> None:
    one, two = runs.by_name["new-alone"].first, runs.by_name["new-on-two"].first
    assert all(torch.equal(weight, two[name]) for name, weight in one.items())


def test_new_weights_are_spread_as_ours(runs: Runs) -> None:
    ours = runs.start("plain").state_dict()
    first = runs.by_name["new-alone"].first
    for name, weight in first.items():
        if weight.numel() < 64:  # of two heads' random starts nothing is known
            continue
        mine = ours[name.removeprefix("language_model.")]
        spread, level = float(mine.std(unbiased=False)), float(mine.mean())
        assert float(weight.std(unbiased=False)) == pytest.approx(spread, rel=0.3), name
        assert float(weight.mean()) == pytest.approx(level, abs=0.1), name


@pytest.mark.parametrize(("name", "step"), [("half", 3), ("sharded", 3), ("sharded", 5)])
def test_a_checkpoint_becomes_a_folder_of_ours(
    runs: Runs, name: str, step: int, tmp_path: Path
) -> None:
    checkpoint = runs.folder / name / "checkpoint" / f"step-{step}"
    kind = str(runs.folder / "plain")
    export(checkpoint, kind, runs.folder / "plain", tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert isinstance(loaded, FastWeightsForCausalLM)
    want = runs.by_name["half" if step == 3 else name].last
    assert worst(loaded, want) == 0
    batch = runs.by_name[name].batches[0]
    trained = runs.start("plain").eval()
    trained.load_state_dict({n.removeprefix("language_model."): w for n, w in want.items()})
    with torch.no_grad():
        got, wanted = (m(input_ids=batch["input"]).logits for m in (loaded.eval(), trained))
    assert torch.equal(got, wanted)


def test_what_torchtitan_reports(runs: Runs) -> None:
    config = runs.start("plain").config
    assert runs.by_name["plain"].report == {
        "parameters": count_parameters(config),
        "operations": training_operations(config, LENGTH),
    }


@pytest.mark.parametrize(
    ("section", "setting", "value", "message"),
    [
        ("parallelism", "tensor_parallel_degree", 2, "not cut over their channels; set it to 1"),
        ("parallelism", "pipeline_parallel_degree", 2, "not cut over its depth; set it to 1"),
        ("parallelism", "context_parallel_degree", 2, "hands on a state instead; set it to 1"),
        ("parallelism", "spmd_backend", "full_dtensor", "leave it at 'spmd_types'"),
        ("training", "seq_len", 2 * LENGTH, "learnt_positions = 64; take a length up to that"),
    ],
)
def test_what_is_not_supported_is_refused(
    folder: Path, section: str, setting: str, value: object, message: str
) -> None:
    settings = titan.trainer_config(str(folder / "tied"))
    setattr(getattr(settings, section), setting, value)
    with pytest.raises(ValueError, match=message):
        settings.model_spec.model.update_from_config(config=settings)


@pytest.mark.parametrize("flavour", ["metala-360m", "mesanet-140m", "samba-421m"])
def test_optimizer_groups_divide_weights_as_ours(flavour: str) -> None:
    config = preset(flavour)
    with torch.device("meta"):
        model = titan.trainer_config(flavour).model_spec.model.build()
    group = re.compile(titan.optimizer_config(OPTIMIZER, config).param_groups[0].pattern)
    decayed = {id(p) for p in matrices(model)}
    for name, p in model.named_parameters():
        recomputed = re.sub(r"(layers\.\d+\.)", rf"\1{_CHECKPOINT_PREFIX}", name)
        for called in (name, recomputed):
            assert bool(group.search(called)) == (id(p) in decayed), called


def test_torchtitan_lists_the_flavours() -> None:
    with pytest.raises(ValueError, match=r"'mesanet-140m', .*'metala-360m'"):
        manager().parse_args(["--module", "fastweights.engines.titan", "--config", "llama"])


PAGE = (Path(__file__).parents[2] / "docs" / "torchtitan.md").read_text()


def test_the_commands_of_the_page_are_understood(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with the module that the page shows, and a folder for what it calls one."""
    (tmp_path / "mypkg_hybrid.py").write_text(
        re.findall(r"```python[^\n]*\n(.*?)```", PAGE, re.S)[0]
    )
    run = tmp_path / "runs" / "quickstart"
    run.mkdir(parents=True)
    (run / "model").symlink_to(folder / "plain")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    lines = re.findall(r"^(?:NGPU.*python|torchrun) .*", PAGE.replace("\\\n", " "), re.M)
    for line in lines:
        words = shlex.split(line.replace("--module hybrid", "--module mypkg_hybrid"))
        settings = manager().parse_args(words[words.index("--module") :])
        settings.model_spec.model.update_from_config(config=settings)
        assert settings.training.seq_len % settings.loss.num_chunks == 0
        words = Path(settings.hf_assets_path)
        assert words == Path("tokenizer") or (words / "tokenizer.json").is_file()
    assert len(lines) == 4
