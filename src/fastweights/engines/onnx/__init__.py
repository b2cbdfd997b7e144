"""Our language models as ONNX graphs, which ONNX Runtime runs anywhere, browsers included."""

from fastweights.engines.onnx.domains import DOMAINS, Domain
from fastweights.engines.onnx.write import ExportError, require_onnx, write_onnx

__all__ = ["DOMAINS", "Domain", "ExportError", "require_onnx", "write_onnx"]
