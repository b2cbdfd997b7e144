"""LoLCATs by its authors' code, in an environment of its own, on a Llama and texts of ours.

    git clone https://github.com/HazyResearch/lolcats
    python3.11 -m venv lolcats/.venv
    lolcats/.venv/bin/pip install "torch<2.14" "numpy<2" "pandas<3" "pyarrow<20" rich tqdm einops \\
        transformers==4.43.1 peft==0.9.0 datasets==2.21.0 "accelerate<1.1" omegaconf scikit-learn

`linearize_pretrained.py --authors lolcats` does the rest: it starts this file by that
environment's Python. Their ``distill_llama.py`` runs as it is but for `PATCHES`, made in the
checkout, and the files of settings that `_write_configs` derives from theirs. Their model is asked
for logits, and measured by what measures ours.
"""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

PATCHES = (
    ("distill_llama.py", "torch.device('cuda')", "torch.device('cpu')"),
    ("src/model/peft.py", "target_dtype: str = 'bfloat16'", "target_dtype: str = 'float32'"),
    # looks for NaN behind every operation, which takes 40 of the 72 s of a step on two cores
    ("src/trainer/default_lm.py", "set_detect_anomaly(True)", "set_detect_anomaly(False)"),
)
MODEL, TEXTS = "llama", "alpaca.json"
"""What stands in the folder of a run."""
CONFIG, DISTILL, FINETUNE = "here", "distill_here", "finetune_lora_here"
PUBLISHED = (
    "distill_llama3_1_8b_lk_smd_wsw64_fd64_w01",
    "distill_alpaca_clean_xent0_mse1000_lr1e-2",
    "finetune_lora_qkvo_alpaca_clean",
)


# ---- what the other environment runs ----


def train(code: Path, folder: Path, steps: int) -> None:
    """Both stages, of so many sequences each, by their script, of the model and the texts in a
    folder, where checkpoints come too."""
    os.chdir(code)
    sys.path.insert(0, str(code))
    _write_model_config(code, folder / MODEL)
    _write_stage_configs(code, folder / TEXTS, steps)
    for file, theirs, ours in PATCHES:
        (code / file).write_text((code / file).read_text().replace(theirs, ours))
    options = {
        "model_config": CONFIG,
        "distill_config": DISTILL,
        "finetune_config": FINETUNE,
        "checkpoint_dir": folder / "checkpoints",
        "results_dir": folder / "results",
        "seed": 0,
    }
    flags = ["--lk_zero_init", "--no_init_eval", "--no_wandb", "--no_peft_grad_ckpt"]
    script = str(code / "distill_llama.py")
    sys.argv = [script, *flags, *(f"--{name}={value}" for name, value in options.items())]
    try:
        runpy.run_path(script, run_name="__main__")
    except AttributeError as error:  # behind the last checkpoint their trainer lacks `evaluate`
        if "evaluate" not in str(error):
            raise


def _write_model_config(code: Path, model: Path) -> None:
    """Their published file with our model, in float32."""
    from omegaconf import OmegaConf

    config = json.loads((model / "config.json").read_text())
    own = OmegaConf.load(code / f"configs/model/{PUBLISHED[0]}.yaml")
    own.model.pretrained_model_name_or_path = str(model)
    own.model.rope_theta = config["rope_theta"]
    own.model.torch_dtype = "float32"
    own.model.device_map = None
    del own.model["rope_scaling"]
    OmegaConf.save(own, code / f"configs/model/{CONFIG}.yaml")


def _write_stage_configs(code: Path, texts: Path, steps: int) -> None:
    """Their published files with our texts and number of steps, in float32."""
    from omegaconf import OmegaConf

    for name, written in zip(PUBLISHED[1:], (DISTILL, FINETUNE), strict=True):
        stage = OmegaConf.load(code / f"configs/experiment/{name}.yaml")
        stage.dataset.dataset_config.path = "json"
        stage.dataset.dataset_config.data_files = str(texts)
        stage.dataset.dataset_config.cache_dir = str(code / "cache")
        stage.dataloader.num_workers, stage.dataloader.pin_memory = 0, False
        stage.trainer.update(
            bf16=False,
            num_train_epochs=1,
            gradient_accumulation_steps=1,
            max_steps=steps,
            eval_steps=steps,
            max_eval_batches=3,
        )
        OmegaConf.save(stage, code / f"configs/experiment/{written}.yaml")


@torch.no_grad()
def answer(code: Path, folder: Path) -> None:
    """Read paths of tokens ``[b t]``, and write their logits ``[b t vocab]`` beside them, by the
    model that `train` has left in a folder."""
    os.chdir(code)
    sys.path[:0] = [str(code), str(code / "src")]
    model = _their_model(code, folder).eval()
    for line in sys.stdin:
        path = Path(line.strip())
        ids = torch.from_numpy(np.load(path))
        np.save(path.with_suffix(".logits.npy"), model(ids, use_cache=False).logits.numpy())
        sys.stdout.write("done\n")
        sys.stdout.flush()


def _their_model(code: Path, folder: Path) -> nn.Module:
    """Their model as their evaluation builds it, of the checkpoints of `train`."""
    from omegaconf import OmegaConf
    from src.model.load_model import load_and_convert_attns, load_and_convert_finetune
    from src.model.pretrained import get_pretrained_loader

    _write_model_config(code, folder / MODEL)
    config = OmegaConf.load(code / f"configs/model/{CONFIG}.yaml")
    loader = get_pretrained_loader(**config.model)
    model = loader.load(model_type=config.attention.attention_type)
    distilled, tuned = (_checkpoint(folder, end) for end in ("distill", "ft"))
    model, _ = load_and_convert_attns(
        model, config, checkpoint_path=distilled, train_attention=False
    )
    stage = OmegaConf.load(code / f"configs/experiment/{PUBLISHED[2]}.yaml")
    return load_and_convert_finetune(model, stage, checkpoint_path=tuned, merge_loras=True)[0]


def _checkpoint(folder: Path, end: str) -> str:
    (found,) = (folder / "checkpoints" / CONFIG).glob(f"*_{end}.pt")
    return str(found)


# ---- what asks it ----


class AuthorsModel(nn.Module):
    """A model in another environment, for what reads logits alone."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        super().__init__()
        self.process, self.folder = process, folder
        self.device = torch.device("cpu")

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        path = self.folder / "tokens.npy"
        np.save(path, input_ids.numpy())
        self.process.stdin.write(f"{path}\n")
        self.process.stdin.flush()
        while (line := self.process.stdout.readline()) != "done\n":
            if not line:
                raise SystemExit("the authors' code ended; its message is above")
        return SimpleNamespace(logits=torch.from_numpy(np.load(path.with_suffix(".logits.npy"))))


def train_there(code: Path, folder: Path, steps: int) -> None:
    """`train` in the environment of the checkout."""
    # dense weights of a layer are 38 MB: memory that is kept is not cleared again
    kept = {"MALLOC_MMAP_THRESHOLD_": "4294967296", "MALLOC_TRIM_THRESHOLD_": "17179869184"}
    environment = {**os.environ, **kept, "THP_MEM_ALLOC_ENABLE": "1", "HF_HUB_OFFLINE": "1"}
    subprocess.run(_command(code, "train", folder, steps), check=True, env=environment)


@contextmanager
def authors_model(code: Path, folder: Path) -> Iterator[AuthorsModel]:
    """The model that `train_there` has left in a folder, where tokens and logits are exchanged."""
    command = _command(code, "answer", folder)
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as there:
        try:
            yield AuthorsModel(there, folder)
        finally:
            there.kill()


def _command(code: Path, *arguments: object) -> list[str]:
    python = code / ".venv" / "bin" / "python"
    return [str(python), str(Path(__file__).resolve()), str(code), *map(str, arguments)]


if __name__ == "__main__":
    checkout, what, *rest = sys.argv[1:]
    if what == "train":
        train(Path(checkout), Path(rest[0]), int(rest[1]))
    else:
        answer(Path(checkout), Path(rest[0]))
