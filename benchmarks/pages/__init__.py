"""The pages of measurements, rendered from benchmarks/results: `make pages`."""

from pages import (
    batch_invariance,
    check,
    engines,
    gpu,
    gpu_static,
    linearize,
    mixers,
    performance,
    plan,
    processes,
    reproduce,
    serving,
    tables,
    transformers_speed,
    transformers_versions,
    vllm,
)
from pages.page import Page

PAGES: tuple[Page, ...] = (
    performance.PAGE,
    gpu.PAGE,
    gpu_static.PAGE,
    linearize.PAGE,
    reproduce.PAGE,
    plan.PAGE,
    processes.SEVERAL,
    processes.LONG,
    transformers_speed.PAGE,
    tables.PAGE,
    mixers.PAGE,
    transformers_versions.PAGE,
    check.PAGE,
    batch_invariance.PAGE,
    vllm.PAGE,
    serving.PAGE,
    engines.ONNX,
    engines.AOT,
)
