"""fastweights export"""

from __future__ import annotations

from fastweights.cli.argument_types import path
from fastweights.cli.parser import Deferred, Parser

FAMILIES = (
    *("bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba"),
    *("kimi_linear", "lfm2", "lfm2_moe", "llama", "mamba", "mamba2", "minimax", "mistral"),
    *("nemotron_h", "olmo_hybrid", "qwen2", "qwen3", "qwen3_5_moe_text", "qwen3_5_text"),
    *("qwen3_next", "recurrent_gemma", "xlstm", "zamba", "zamba2"),
)
"""Model types that `fastweights.importers` writes."""
DOMAINS = ("com.microsoft", "ai.onnx")
"""Sets of ONNX operators that `fastweights.engines.onnx` writes."""


def export(parser: Parser) -> Deferred:
    """Turn a model of this library into one of transformers that computes the same, with its
    tokenizer; into an ONNX graph (needs the extra onnx); or into programs that torch has compiled
    ahead of time (needs a C++ compiler).
    """
    parser.add_argument(
        "checkpoint", type=path, help="The model: a folder of a run, a checkpoint or a model"
    )
    parser.add_argument(
        "out",
        type=path,
        help="Folder to write to, or a file that ends in .onnx or .pt2; it must not exist yet",
    )
    parser.add_argument(
        "--family",
        choices=FAMILIES,
        metavar="FAMILY",
        help="The model type of transformers that it is written as (default: the first that has"
        f" such models): {', '.join(FAMILIES)}",
    )
    parser.add_argument(
        "--domain",
        choices=DOMAINS,
        help="Whose LinearAttention and CausalConvWithState an ONNX graph has (default:"
        " com.microsoft, which ONNX Runtime runs today)",
    )
    return Deferred("export", "export_model_folder")
