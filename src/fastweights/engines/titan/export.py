"""A checkpoint of torchtitan as a folder of ours: ``python -m fastweights.engines.titan.export``.

What torchtitan writes as it trains is `torch.distributed.checkpoint`'s format, whose index is a
pickle; it is read here with nothing allowed but the records that such an index is made of. What it
writes at the end with ``last_save_in_hf`` is safetensors. Neither needs torchtitan to be read.
"""

from __future__ import annotations

import argparse
import pickle
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.state_dict_loader import load
from transformers import AutoTokenizer

from fastweights.engines.titan.names import HEAD, PREFIX, find_config
from fastweights.errors import CheckpointError
from fastweights.models import FastWeightsForCausalLM
from fastweights.training.data.tokenizers import require_embeddings
from fastweights.training.loop.checkpoint import save_model
from fastweights.training.loop.files import atomic_folder

INDEX = ".metadata"
"""The file by which a folder is a checkpoint of torchtitan in the midst of training."""
RECORDS = {
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},  # as Python 3.13 names them
    "torch": {"Size"} | {str(d)[6:] for d in vars(torch).values() if isinstance(d, torch.dtype)},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.serialization": {"_get_layout"},
}
"""What the index of a checkpoint is made of, by modules."""


class IndexUnpickler(pickle.Unpickler):
    """Reads the index of a checkpoint, and refuses a pickle that holds anything else."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        """Return one of `RECORDS`."""
        if global_name not in RECORDS.get(module_name, ()):
            raise CheckpointError(
                f"the checkpoint's index names {module_name}.{global_name}, which no checkpoint of"
                " torchtitan does; it is not read"
            )
        return super().find_class(module_name.removesuffix("._local"), global_name)


class IndexedReader(FileSystemReader):
    """PyTorch's reader of checkpoints, with `IndexUnpickler` in the place of pickle."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what the checkpoint holds, and where.

        Raises:
            CheckpointError: The index is damaged, or no index.
        """
        with (Path(self.path) / INDEX).open("rb") as file:
            try:
                metadata = IndexUnpickler(file).load()
            except (pickle.UnpicklingError, EOFError, AttributeError, IndexError) as error:
                raise CheckpointError(f"{file.name} is damaged ({error})") from error
        if not isinstance(metadata, Metadata):
            raise CheckpointError(f"{file.name} is damaged (it holds {type(metadata).__name__})")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def export(step: Path, model: str, tokenizer: Path, out: Path) -> None:
    """Write the model of a checkpoint as a folder of ours, with its tokenizer.

    Args:
        step: A folder ``checkpoint/step-…`` of torchtitan.
        model: The flavour that it was trained as: a preset's name or a folder of ours.
        tokenizer: A folder with the tokenizer, such as torchtitan's ``hf_assets_path``.
        out: The folder to write, which must not exist yet.

    Raises:
        CheckpointError: The checkpoint is none, or of another model.
        ValueError: The flavour is not known, or `out` exists.
    """
    if out.exists():
        raise ValueError(f"{out} exists already; name a new folder")
    words: Any = AutoTokenizer.from_pretrained(tokenizer)
    made = FastWeightsForCausalLM(find_config(model))
    require_embeddings(words, made.config.vocab_size, model)
    _fill(made, step)
    with atomic_folder(out) as folder:
        save_model(made, words, folder)


def _fill(model: FastWeightsForCausalLM, step: Path) -> None:
    """Read all weights of a model in place, once the checkpoint is known to hold them."""
    reader, prefix = _open(step)
    stored = reader.read_metadata().state_dict_metadata
    weights, tied = dict(model.state_dict()), model.config.tie_word_embeddings
    if tied:
        head = weights.pop(HEAD)
        if prefix + HEAD in stored:
            weights[HEAD] = head.clone()
    for name, weight in weights.items():
        _require_stored(getattr(stored.get(prefix + name), "size", None), name, weight, step)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        named = {prefix + name: weight for name, weight in weights.items()}
        load(named, storage_reader=reader, no_dist=True)
    if not torch.equal(weights.get(HEAD, model.lm_head.weight), model.lm_head.weight):
        raise CheckpointError(
            f"{step} has a head of its own, which a model with tie_word_embeddings has not; name"
            " the model that it was trained as"
        )


def _open(step: Path) -> tuple[Any, str]:
    """The reader of a checkpoint, and what the names of weights begin with there."""
    if (step / INDEX).is_file():
        return IndexedReader(step), PREFIX
    if any(step.glob("*.safetensors")):
        return HuggingFaceStorageReader(str(step)), ""
    raise CheckpointError(
        f"{step} is no checkpoint of torchtitan: it has neither {INDEX} nor .safetensors files;"
        " name one of the folders step-… in its checkpoint folder"
    )


def _require_stored(found: Sequence[int] | None, name: str, weight: Tensor, step: Path) -> None:
    if found != weight.shape:
        raise CheckpointError(
            f"{step} is not of this model: {name} has shape {list(weight.shape)}, and there"
            f" {'is none' if found is None else f'it has {list(found)}'}; name the model that it"
            " was trained as"
        )


def main() -> None:
    """Export with the arguments of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m fastweights.engines.titan.export",
        description="Turn a checkpoint of torchtitan into a folder that fastweights and"
        " transformers load.",
    )
    parser.add_argument("step", type=Path, help="A folder step-… in torchtitan's checkpoint folder")
    parser.add_argument(
        "--model", required=True, help="What it was trained as: a preset, or a folder of ours"
    )
    parser.add_argument("--tokenizer", type=Path, required=True, help="The folder of its tokenizer")
    parser.add_argument("--out", type=Path, required=True, help="Folder to write, a new one")
    given = parser.parse_args()
    try:
        export(given.step, given.model, given.tokenizer, given.out)
    except (CheckpointError, ValueError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
