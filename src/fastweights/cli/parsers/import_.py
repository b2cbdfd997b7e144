"""fastweights import"""

from __future__ import annotations

from fastweights.cli.argument_types import given, path
from fastweights.cli.parser import Deferred, Parser, add_dtype

FAMILIES = (
    "bailing_hybrid",
    "bamba",
    "comba",
    "delta_net",
    "falcon_h1",
    "falcon_mamba",
    "gated_deltanet",
    "gated_deltaproduct",
    "gla",
    "granitemoehybrid",
    "gsa",
    "hgrn2",
    "jamba",
    "kda",
    "kimi_linear",
    "lfm2",
    "lfm2_moe",
    "llama",
    "log_linear_mamba2",
    "mamba",
    "mamba2",
    "mesa_net",
    "metala",
    "minimax",
    "mistral",
    "mom",
    "nemotron_h",
    "olmo_hybrid",
    "qwen2",
    "qwen3",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "raven",
    "recurrent_gemma",
    "retnet",
    "rwkv",
    "rwkv6",
    "rwkv7",
    "xlstm",
    "zamba",
    "zamba2",
)
"""Model types that `fastweights.importers` reads."""


def import_(parser: Parser) -> Deferred:
    """Turn a model that another library has trained into one of this library, with its
    tokenizer.
    """
    parser.add_argument(
        "model",
        type=given,
        help="The model to read: a folder, or a name on the Hugging Face hub; its type is one of "
        + ", ".join(FAMILIES),
    )
    parser.add_argument(
        "--out", type=path, required=True, help="Folder to write to, which must not exist yet"
    )
    add_dtype(parser)
    return Deferred("import_", "import_model_folder")
