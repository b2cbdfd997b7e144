"""Loading a model for a verb: what is wrong with its folder is said in one sentence."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from fastweights.errors import CheckpointError, reason_of
from fastweights.importers import import_model
from fastweights.importers.gguf import is_gguf, keep_codes
from fastweights.models import FastWeightsConfig, FastWeightsForCausalLM, FewBitsConfig
from fastweights.models.quantize import stored_bits
from fastweights.models.size import require_memory
from fastweights.training.language.existing import fingerprint
from fastweights.training.loop.checkpoint import (
    model_source,
    no_progress_bars,
    no_warnings_of_transformers,
)

_UNREADABLE = (
    *(ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError),
    *(SafetensorError, StrictDataclassError),
)
"""What readers raise at a file that is JSON or tensors, but not what they expect."""


def rounded_bits(chosen: Namespace) -> int | None:
    """Of weights by --int8 or --int4; None if they stay.

    Raises:
        ValueError: for both
    """
    if chosen.int8 and chosen.int4:
        raise ValueError("--int8 and --int4 both say how weights are rounded; give one of them")
    return 8 if chosen.int8 else 4 if chosen.int4 else None


def model_identity(source: str | Path, bits: int | None) -> str:
    """Return what identifies a model's weights, as they are rounded."""
    rounded = f" int{bits}" if bits else ""
    return fingerprint(model_source(source)) + rounded


def rounded_source(source: str | Path, bits: int | None) -> str | Path:
    """What is loaded with weights of so many bits: of a GGUF file a folder with its codes."""
    if bits is None or not is_gguf(source):
        return source
    with no_progress_bars(), no_warnings_of_transformers():
        return keep_codes(Path(source), bits)


def load_model(
    source: str | Path, device: torch.device, *, bits: int | None = None
) -> tuple[Any, Any]:
    """A language model in evaluation mode and its tokenizer.

    Args:
        source: a folder of a run, a checkpoint or a model, a GGUF file, or a name on the hub
        bits: of its weights, if they are rounded

    Raises:
        CheckpointError: If a file of the folder cannot be used; the message names it.
        ValueError: If the machine lacks the memory for the model.
    """
    source = rounded_source(source, bits)
    load_config(source)  # whose errors come first
    tokenizer = require_tokenizer(source)
    return load_weights(source, device, bits=bits), tokenizer


def load_weights(
    source: str | Path, device: torch.device, *, bits: int | None = None, shown: bool = False
) -> Any:
    """A language model in evaluation mode, which may lack a tokenizer; else as `load_model`, with
    the weights that are read `shown` by transformers' bar, or not.
    """
    folder = model_source(rounded_source(source, bits))
    with nullcontext() if shown else no_progress_bars():
        config = load_config(folder)
        model = _load_weights(folder, config, _rounding(source, config, bits, device))
    return model.to(device).eval()


def _rounding(
    source: str | Path, config: Any, bits: int | None, device: torch.device
) -> dict[str, Any]:
    """What transformers is told of weights of few bits."""
    stored = stored_bits(config)
    # what is left is little, and C reads codes beside float32
    dtype = {"dtype": torch.float32} if device.type == "cpu" else {}
    if stored is None:
        return {} if bits is None else {**dtype, "quantization_config": FewBitsConfig(bits)}
    if bits not in (None, stored):
        raise ValueError(
            f"the weights of {source} are of {stored} bits already; leave --int{bits} out, or name"
            " the model that it was made from"
        )
    return dtype


def require_floats(source: str | Path, config: Any) -> None:
    """Refuse a model for what is done with floats alone.

    Raises:
        ValueError: If its weights are stored in few bits.
    """
    if (bits := stored_bits(config)) is not None:
        raise ValueError(
            f"the weights of {source} are of {bits} bits; name the model that it was made from"
        )


def require_tokenizer(source: str | Path) -> Any:
    """The tokenizer beside a model.

    Raises:
        CheckpointError: If there is none that can be used.
    """
    folder = model_source(source)
    with no_progress_bars(), _names(folder, "tokenizer.json or tokenizer_config.json"):
        return AutoTokenizer.from_pretrained(folder)


def load_tokenizer(source: str | Path) -> Any | None:
    """The tokenizer beside a model; None if there is none."""
    try:
        with no_progress_bars(), no_warnings_of_transformers():
            return AutoTokenizer.from_pretrained(model_source(source))
    except (OSError, *_UNREADABLE):
        return None


def load_as_own(source: str | Path, device: torch.device) -> FastWeightsForCausalLM:
    """A language model of this library, as `load_weights`; one of another library as `import_model`
    makes it, which refuses before weights are read what it cannot import.
    """
    folder = model_source(source)
    config = load_config(folder)
    if isinstance(config, FastWeightsConfig):
        return load_weights(folder, device)
    require_floats(source, config)
    with no_progress_bars():
        model: Any = import_model(folder)
    _require_finite(folder, model)
    return model.to(device).eval()


def load_config(source: str | Path) -> Any:
    """The configuration of a model.

    Raises:
        CheckpointError: If config.json cannot be used.
        ValueError: If the machine lacks the memory for a model of this library.
    """
    folder = model_source(source)
    with _names(folder, "config.json"):
        config = AutoConfig.from_pretrained(folder)
        if isinstance(config, FastWeightsConfig):
            dtype: Any = config.dtype or torch.float32
            require_memory(config, dtype.itemsize)
        return config


def _load_weights(folder: str | Path, config: Any, rounding: dict[str, Any]) -> Any:
    with _names(folder, "config.json or the weights"), no_warnings_of_transformers():
        # transformers would print a table of every weight that does not fit, then raise
        loose = {"strict": False} if isinstance(config, FastWeightsConfig) else {}
        told = {"ignore_mismatched_sizes": True, "output_loading_info": True, **loose, **rounding}
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, config=config, **told)
    model, found = loaded
    _require_fit(folder, found)
    _require_finite(folder, model)
    _require_ids(folder, model.generation_config)
    return model


def _require_fit(folder: str | Path, found: Mapping[str, Any]) -> None:
    mismatched, missing = sorted(found["mismatched_keys"]), sorted(found["missing_keys"])
    if mismatched:
        name, stored, wanted = mismatched[0]
        raise CheckpointError(
            f"{folder}: {len(mismatched)} weights are not of the shapes that config.json says, such"
            f" as {name}, which is {tuple(stored)} instead of {tuple(wanted)}; put the config.json"
            " there that the weights were saved with"
        )
    if missing:
        raise CheckpointError(
            f"{folder}: the weights lack {len(missing)} of those that config.json asks for,"
            f" {_some(missing)}; put the config.json there that they were saved with"
        )


def _require_finite(folder: str | Path, model: Any) -> None:
    bad = [name for name, p in model.named_parameters() if not p.isfinite().all()]
    if bad:
        raise CheckpointError(
            f"{folder}: {len(bad)} weights hold numbers that are infinite or not a number,"
            f" {_some(bad)}; the training diverged, or the file is damaged: use an earlier"
            " checkpoint"
        )


def _require_ids(folder: str | Path, generation: Any) -> None:
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        found = getattr(generation, name, None)
        several = found if isinstance(found, list) else [found]
        if not all(one is None or type(one) is int for one in several):
            raise CheckpointError(
                f"{folder}/generation_config.json: {name} = {found!r}; it must be a number of the"
                " vocabulary, a list of them, or null"
            )


def _some(names: Iterable[str]) -> str:
    return "among them " + ", ".join(islice(names, 3))


@contextmanager
def _names(folder: str | Path, file: str) -> Iterator[None]:
    """Name the file that a reader cannot use, in place of the reader's own error."""
    try:
        yield
    except CheckpointError:
        raise
    except _UNREADABLE as error:
        raise CheckpointError(f"{folder}: {file} cannot be used ({reason_of(error)})") from error
