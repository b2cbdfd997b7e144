"""The pages of measurements, rendered from benchmarks/results: `make pages`."""

from pages import (
    gpu_static,
    linearize,
    mesa,
    performance,
    plan,
    reproduce,
    tables,
    transformers_versions,
)
from pages.page import Page

PAGES: tuple[Page, ...] = (
    performance.PAGE,
    gpu_static.PAGE,
    mesa.PAGE,
    linearize.PAGE,
    reproduce.PAGE,
    plan.PAGE,
    tables.PAGE,
    transformers_versions.PAGE,
)
