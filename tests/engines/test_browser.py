"""The page of examples/browser in headless Chromium, against greedy `generate`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from fastweights import FastWeightsConfig, FastWeightsForCausalLM
from fastweights.cli.load import load_model
from fastweights.cli.verbs.generate import encode_prompt
from fastweights.training.data.tokenizers import BPE, Bytes, Tokenization

pytestmark = pytest.mark.browser

PAGE = Path(__file__).parents[2] / "examples" / "browser"
TEXT = "Où êtes-vous, naïve Zoé? À l'été 1789 — c'est ici. 日本 😀\n"
CONSTANT: tuple[str, Tokenization] = ("shortconv,metala,gated_deltanet", Bytes())
GROWING: tuple[str, Tokenization] = ("softmax,metala", BPE(300))
PROMPTS = ("Où êtes", "日本", "x 😀 1789  \n\n")
NEW = 90
"""Tokens: more than the text has, so that the greedy ones go through every character of it."""
CACHED = 2 * 32 * 4 + 8
"""Bytes of a token in the cache of softmax attention: a key, a value and a position."""


class Handler(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """The address of a server of the folder, as `python -m http.server` is one."""
    handler: Any = partial(Handler, directory=str(folder))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def export(model: Path, out: Path) -> None:
    """In a process without the type checker of the tests."""
    line = [sys.executable, "-m", "fastweights.cli", "export", str(model), str(out)]
    subprocess.run(line, check=True)


def train(model: FastWeightsForCausalLM, ids: torch.Tensor) -> None:
    """Teach it the text by heart, well enough that greedy tokens are not close calls."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(80):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()


def write_page(folder: Path, mixers: str, tokenization: Tokenization) -> Path:
    """A folder with the page, its packages, and a graph with the model beside it in `model`."""
    tokenizer = tokenization.build([TEXT * 9])
    torch.manual_seed(0)
    config = FastWeightsConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=mixers.count(",") + 1,
        mixers=[{"name": name} for name in mixers.split(",")],
        **{name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id")},
    )
    model = FastWeightsForCausalLM(config)
    train(model, torch.tensor([tokenizer.encode(TEXT * 3)]))
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    export(folder / "model", folder / "model.onnx")
    for path in (*PAGE.glob("*.html"), *PAGE.glob("*.js"), PAGE / "node_modules"):
        (folder / path.name).symlink_to(path)
    return folder


@pytest.fixture(scope="module")
def constant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(tmp_path_factory.mktemp("constant"), *CONSTANT)


@pytest.fixture(scope="module")
def growing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(tmp_path_factory.mktemp("growing"), *GROWING)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """The system's, or else the one that playwright installs."""
    from playwright.sync_api import sync_playwright

    names = ("chromium", "chromium-browser", "google-chrome")
    system = next((path for name in names if (path := shutil.which(name))), None)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=system)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Any) -> Iterator[Callable[[str], Any]]:
    """Opens an address and waits until the page has its model, or says why not."""
    pages: list[Any] = []

    def open_one(address: str) -> Any:
        page = chromium.new_page()
        pages.append(page)
        page.goto(address)
        page.wait_for_selector("#run:enabled, #error:not([hidden])")
        return page

    yield open_one
    for page in pages:
        page.close()


def write(page: Any, prompt: str, *, tokens: int = NEW, temperature: float = 0) -> None:
    """Ask for a text, and wait until it is there."""
    page.fill("#prompt", prompt)
    page.fill("#tokens", str(tokens))
    page.fill("#temperature", str(temperature))
    page.click("#run")
    page.wait_for_selector("#run:text('Generate')")


def shown(page: Any, selector: str) -> str:
    return page.text_content(selector)


def expected(folder: Path, prompt: str) -> str:
    """The prompt and its greedy continuation."""
    model, tokenizer = load_model(folder / "model", torch.device("cpu"))
    ids = torch.tensor([encode_prompt(prompt, tokenizer)])
    found = model.generate(ids, max_new_tokens=NEW, do_sample=False)
    return tokenizer.decode(found[0], skip_special_tokens=True)


def test_the_greedy_text_is_that_of_generate(
    constant: Path, open_page: Callable[[str], Any]
) -> None:
    with served(constant) as address:
        page = open_page(address)
        assert shown(page, "#growth") == "of state, at any length"
        for prompt in PROMPTS:
            write(page, prompt)
            assert page.is_hidden("#error")
            assert shown(page, "output") == expected(constant, prompt)
            assert shown(page, "#count") == str(NEW)
            assert int(shown(page, "#speed")) > 0
        assert TEXT[-9:] in shown(page, "output .continuation")


def test_the_state_is_as_large_as_it_says(
    constant: Path, growing: Path, open_page: Callable[[str], Any]
) -> None:
    def sizes(folder: Path) -> list[str]:
        with served(folder) as address:
            page = open_page(address)
            found = []
            for tokens in (3, 60):
                write(page, "a", tokens=tokens)
                found.append(shown(page, "#state"))
            return found

    few, many = sizes(constant)
    assert few == many
    few, many = (float(size.removesuffix(" KB")) for size in sizes(growing))
    assert many - few == pytest.approx((60 - 3) * CACHED / 1000, abs=0.11)


def test_softmax_layers_and_byte_pairs(growing: Path, open_page: Callable[[str], Any]) -> None:
    with served(growing) as address:
        page = open_page(address)
        assert shown(page, "#growth") == "of state, which grows"
        for prompt in PROMPTS:
            write(page, prompt)
            assert shown(page, "output") == expected(growing, prompt)


def test_long_prompts_are_read_in_pieces(constant: Path, open_page: Callable[[str], Any]) -> None:
    with served(constant) as address:
        page = open_page(address)
        write(page, TEXT * 3)
        assert shown(page, "output") == expected(constant, TEXT * 3)


def test_a_text_is_drawn_and_stopped(constant: Path, open_page: Callable[[str], Any]) -> None:
    with served(constant) as address:
        page = open_page(address)
        texts = set()
        for _ in range(2):
            write(page, "a", tokens=40, temperature=3)
            texts.add(shown(page, "output"))
        assert len(texts) == 2
        page.fill("#tokens", "1000000")
        page.fill("#temperature", "0")
        page.click("#run")
        page.wait_for_function("Number(document.getElementById('count').textContent) > 5")
        page.click("#run:text('Stop')")
        page.wait_for_selector("#run:text('Generate')")
        assert int(shown(page, "#count").replace(",", "")) < 100_000


def test_an_empty_prompt_begins_a_text(constant: Path, open_page: Callable[[str], Any]) -> None:
    with served(constant) as address:
        page = open_page(address)
        write(page, "")
        assert shown(page, "output") == expected(constant, "")


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda f: (f / "model.onnx").unlink(), "has no ./model.onnx (status 404). `fastweights"),
        (lambda f: (f / "tokenizer.json").unlink(), "has no ./tokenizer.json (status 404)"),
        (lambda f: damage(f / "tokenizer.json"), "./tokenizer.json is damaged. Export the model"),
        (lambda f: (f / "node_modules").unlink(), "is not here. Run `npm install` in this folder"),
        (lambda f: damage(f / "model.onnx"), "model.onnx is damaged. Export the model again."),
        (lambda f: (f / "model.onnx").write_bytes(b""), "is no graph of this library"),
    ],
)
def test_what_is_wrong_is_said_in_sentences(
    spoil: Callable[[Path], object],
    words: str,
    constant: Path,
    tmp_path: Path,
    open_page: Callable[[str], Any],
) -> None:
    folder = tmp_path / "page"
    shutil.copytree(constant, folder, symlinks=True)
    spoil(folder)
    with served(folder) as address:
        page = open_page(address)
        assert words in shown(page, "#error")
        assert shown(page, "#error").endswith(".")
        assert shown(page, "#status") == "The model is not loaded."
        assert page.is_disabled("#run")


def test_a_page_without_a_server_says_so(constant: Path, chromium: Any) -> None:
    page = chromium.new_page()
    page.goto((constant / "index.html").as_uri())
    assert "Run `python -m http.server` in this folder" in shown(page, "#error")
    page.close()
