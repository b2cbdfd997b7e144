"""Checkpoints in programs that do not import fastweights, and in others' tools."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel, Trainer
from transformers.utils import hub

from families import student
from fastweights import (
    FastWeightsConfig,
    FastWeightsForCausalLM,
    FastWeightsForImageClassification,
    FastWeightsForSequenceClassification,
    FastWeightsForTokenClassification,
    FastWeightsVisionConfig,
)
from fastweights.linearize import linearize
from fastweights.models import modeling_fastweights
from fastweights.models.checkpoint_code import CODE
from fastweights.train import Bytes
from fastweights.training.loop.checkpoint import save_model
from pretrained import llama
from tiny import tiny, tiny_config


def vision() -> FastWeightsForImageClassification:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "image_size": 8, "patch_size": 4}
    return FastWeightsForImageClassification(FastWeightsVisionConfig(**sizes, num_labels=3))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "language": tiny,
    "sequences": lambda: FastWeightsForSequenceClassification(tiny_config(num_labels=3)),
    "tokens": lambda: FastWeightsForTokenClassification(tiny_config(num_labels=3)),
    "images": vision,
    "llama": student,
    "gpt2": lambda: student("gpt2"),
}
every_model = pytest.mark.parametrize("name", MODELS)


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


# the file of imports ------------------------------------------------------------------------------


def test_the_file_imports_from_fastweights_and_does_nothing_else() -> None:
    docstring, *imports = ast.parse(CODE.read_text()).body
    assert isinstance(docstring, ast.Expr)
    assert isinstance(docstring.value, ast.Constant)
    assert imports
    assert all(
        isinstance(line, ast.ImportFrom) and str(line.module).split(".")[0] == "fastweights"
        for line in imports
    )


@every_model
def test_every_model_carries_it_and_names_its_classes(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    model.save_pretrained(tmp_path)
    assert (tmp_path / CODE.name).read_bytes() == CODE.read_bytes()
    named = config_of(tmp_path)["auto_map"]
    assert {"AutoConfig", "AutoModel"} < named.keys()
    assert f"{CODE.stem}.{type(model).__name__}" in named.values()
    for automatic, path in named.items():
        file, _, cls = path.partition(".")
        found = getattr(modeling_fastweights, cls)
        assert file == CODE.stem
        if automatic == "AutoConfig":
            assert found is type(model.config)
        else:
            assert type(getattr(transformers, automatic).from_config(model.config)) is found


def test_it_has_no_other_names() -> None:
    with pytest.raises(AttributeError, match="nonsense"):
        _ = modeling_fastweights.nonsense


def merge(model: Any, folder: Path) -> None:
    config = LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM")
    get_peft_model(model, config).merge_and_unload().save_pretrained(folder)


def push(model: Any, folder: Path) -> None:
    """As it would be uploaded."""
    with pytest.MonkeyPatch.context() as patch:
        repository = type("Repository", (), {"repo_id": "me/model"})
        api = type("Api", (), {"create_repo": lambda *_, **__: repository})
        card = type("Card", (), {"save": lambda *_: None})
        patch.setattr(hub, "hf_api", api)
        patch.setattr(hub, "create_and_tag_model_card", lambda *_, **__: card())
        patch.setattr(
            type(model), "_upload_modified_files", lambda _, made, *__, **___: copy(made, folder)
        )
        model.push_to_hub("model")


def copy(made: str, folder: Path) -> None:
    for file in Path(made).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())


WRITERS: dict[str, Callable[[Any, Path], object]] = {
    "the command": lambda model, folder: save_model(model, Bytes().build([]), folder),
    "peft": merge,
    "Trainer": lambda model, folder: Trainer(model).save_model(str(folder)),
    "push_to_hub": push,
}


@pytest.mark.parametrize("model", [tiny, student], ids=["ours", "linearized"])
@pytest.mark.parametrize("writer", WRITERS)
def test_whoever_writes_a_checkpoint_writes_it(
    writer: str, model: Callable[[], Any], tmp_path: Path
) -> None:
    WRITERS[writer](model(), tmp_path)
    assert (tmp_path / CODE.name).read_bytes() == CODE.read_bytes()
    assert "AutoModelForCausalLM" in config_of(tmp_path)["auto_map"]


@every_model
def test_what_was_saved_before_loads(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    model.save_pretrained(tmp_path)
    (tmp_path / CODE.name).unlink()
    config = config_of(tmp_path)
    del config["auto_map"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert type(AutoModel.from_pretrained(tmp_path).config) is type(model.config)
    assert type(type(model).from_pretrained(tmp_path)) is type(model)


class OwnConfig(FastWeightsConfig):
    """Of a user."""

    model_type = "own_fastweights"


class OwnModel(FastWeightsForCausalLM):
    """Of a user."""

    config_class = OwnConfig


def test_code_of_users_is_carried_as_transformers_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for cls in (OwnConfig, OwnModel):
        monkeypatch.setattr(cls, "_auto_class", None)
    OwnConfig.register_for_auto_class()
    OwnModel.register_for_auto_class("AutoModelForCausalLM")
    model = OwnModel(OwnConfig(vocab_size=31, hidden_size=16, num_hidden_layers=1))
    model.save_pretrained(tmp_path)
    file = Path(__file__)
    assert (tmp_path / file.name).read_bytes() == file.read_bytes()
    assert config_of(tmp_path)["auto_map"] == {
        "AutoConfig": f"{file.stem}.OwnConfig",
        "AutoModelForCausalLM": f"{file.stem}.OwnModel",
    }


# other programs -----------------------------------------------------------------------------------


def run(program: str, *arguments: object, cache: Path, **more: Any) -> str:
    """What a program without a terminal prints, which imports this fastweights where it does."""
    source = str(Path(transformers.__file__).parents[1])
    paths = [str(CODE.parents[2]), source]
    result = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={
            "PATH": "/usr/bin:/bin",
            "PYTHONPATH": ":".join(paths),
            "HF_HOME": str(cache),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TRANSFORMERS_VERBOSITY": "error",
        },
        **more,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def saved(model: Any, folder: Path) -> Path:
    """With a tokenizer that has an end, as a run's folder has."""
    save_model(model.float(), Bytes().build([]), folder)
    return folder


OURS = {
    "ours": lambda: tiny(vocab_size=300),
    "linearized": lambda: linearize(llama(vocab_size=300)),
}
each = pytest.mark.parametrize("name", OURS)

UNSUSPECTING = """
import sys, torch
from transformers import AutoModelForCausalLM, pipeline
folder, trusted = sys.argv[1], {"trust_remote_code": True}
for options in ({}, {"trust_remote_code": False}):
    try:
        AutoModelForCausalLM.from_pretrained(folder, **options)
    except ValueError as error:
        assert "trust_remote_code=True" in str(error)
assert not any(name.startswith("fastweights") for name in sys.modules)
model = AutoModelForCausalLM.from_pretrained(folder, **trusted)
print("\\n" + type(model).__module__, float(model(torch.arange(3, 20)[None]).logits.double().sum()))
texts = pipeline("text-generation", folder, **trusted)("ab", max_new_tokens=2)
print(repr(texts[0]["generated_text"]))
model.save_pretrained(folder + "/again")
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ours", pytest.param("linearized", marks=pytest.mark.slow)])
def test_a_program_that_never_heard_of_us_loads_it(name: str, tmp_path: Path) -> None:
    model = OURS[name]()
    folder = saved(model, tmp_path / "model")
    *_, first, text = run(UNSUSPECTING, folder, cache=tmp_path / "cache").splitlines()
    module, total = first.split()
    assert module == type(model).__module__
    known = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        assert float(total) == pytest.approx(float(known(ids).logits.double().sum()), rel=1e-4)
    assert ast.literal_eval(text).startswith("ab")
    assert config_of(folder / "again") == config_of(folder)
    assert {file.name for file in (folder / "again").iterdir()} <= {
        file.name for file in folder.iterdir()
    }


def test_the_file_is_not_run_once_fastweights_is_imported(tmp_path: Path) -> None:
    folders = [saved(make(), tmp_path / name) for name, make in OURS.items()]
    for options in ({}, {"trust_remote_code": False}, {"trust_remote_code": True}):
        models = [AutoModelForCausalLM.from_pretrained(folder, **options) for folder in folders]
        names = [type(model).__name__ for model in models]
        assert names == ["FastWeightsForCausalLM", "LinearizedLlamaForCausalLM"]
    assert not any(name.startswith("transformers_modules.") for name in sys.modules)


WITHOUT = """
import sys
class Uninstalled:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "fastweights":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Uninstalled())
from transformers import AutoModelForCausalLM
for folder in sys.argv[1:]:
    try:
        AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
    except ImportError as error:
        print(error)
"""


@pytest.mark.long
def test_without_fastweights_it_says_what_to_install(tmp_path: Path) -> None:
    folders = [saved(make(), tmp_path / name) for name, make in OURS.items()]
    messages = run(WITHOUT, *folders, cache=tmp_path).splitlines()
    assert len(messages) == 2
    assert all(message.endswith("Run `pip install fastweights`") for message in messages)


SERVER = """
import sys
from transformers.cli.serving.model_manager import ModelManager
manager = ModelManager(device="cpu", trust_remote_code=True)
for folder in sys.argv[1:]:
    model, processor = manager.load_model_and_processor(folder + "@main")
    print(type(model).__name__, manager.get_model_modality(model, processor).name)
for loaded in list(manager.loaded_models.values()):
    loaded.delete_model()
"""


@pytest.mark.slow
def test_the_server_of_transformers_finds_them(tmp_path: Path) -> None:
    folders = [saved(make(), tmp_path / name) for name, make in OURS.items()]
    assert run(SERVER, *folders, cache=tmp_path).splitlines() == [
        "FastWeightsForCausalLM LLM",
        "LinearizedLlamaForCausalLM LLM",
    ]


HARNESS = """
import sys
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
*folders, task = sys.argv[1:]
for folder in folders:
    found = simple_evaluate(
        model="hf",
        model_args=f"pretrained={folder},trust_remote_code=True",
        tasks=["few_items"],
        task_manager=TaskManager(include_path=task, include_defaults=False),
        device="cpu",
        log_samples=True,
    )
    print(len(found["samples"]["few_items"]), found["results"]["few_items"]["acc,none"])
"""
TASK = """
task: few_items
dataset_path: json
dataset_kwargs: {{data_files: {{test: {items}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{q}}}}"
doc_to_choice: "{{{{a}}}}"
doc_to_target: gold
metric_list: [{{metric: acc}}]
"""


@pytest.mark.slow
def test_the_evaluation_harness_reads_them(tmp_path: Path) -> None:
    folders = [saved(make(), tmp_path / name) for name, make in OURS.items()]
    items = tmp_path / "items.jsonl"
    rows = [{"q": "the cat sat on the", "a": [" mat", " hill"], "gold": i} for i in (0, 1)]
    items.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "few_items.yaml").write_text(TASK.format(items=items))
    lines = run(HARNESS, *folders, tmp_path, cache=tmp_path).splitlines()
    assert [line for line in lines if line.startswith("2 ")] == ["2 0.5", "2 0.5"]
