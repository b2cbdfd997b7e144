"""Files as users have them: read right, or refused in a sentence that names file and place; what is
left out is counted in a line."""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import warnings
import zipfile
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from fastweights.cli import main
from fastweights.errors import DataError
from fastweights.training.data import files
from fastweights.training.data.left_out import LeftOutWarning
from fastweights.training.data.sources import paths
from fastweights.training.loop.files import read_json, write_json
from fastweights.training.loop.json_lines import append_row, read_rows
from stored import texts

ROWS = [{"id": n, "text": f"text {n}"} for n in range(6)]
TEXTS = [row["text"] for row in ROWS]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)
FIRST, SECOND = json.dumps(ROWS[:3]), json.dumps(ROWS[3:])
TABLE = "id,text\n" + "".join(f"{row['id']},{row['text']}\n" for row in ROWS)
GERMAN = "Grün ist schön. " * 40


def as_parquet(**columns: object) -> bytes:
    file = io.BytesIO()
    parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()


def as_zip() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("a.txt", "text")
    return file.getvalue()


def as_zstandard(content: bytes) -> bytes:
    return pyarrow.Codec("zstd").compress(content, asbytes=True)


READ: dict[str, str | bytes] = {
    "a.JSONL": LINES,
    "a.Jsonl": LINES,
    "a.ndjson": LINES,
    "a.NDJSON.Gz": gzip.compress(LINES.encode()),
    "a.jsonlines": LINES,
    "a.jsonl.GZ": gzip.compress(LINES.encode()),
    "a.Json.ZST": as_zstandard(LINES.encode()),
    "a.JSON": json.dumps(ROWS),
    "a.CSV": TABLE,
    "a.Tsv": TABLE.replace(",", "\t"),
    "a.Parquet": as_parquet(text=TEXTS),
    "dictionary.parquet": as_parquet(text=pyarrow.array(TEXTS).dictionary_encode()),
    "arrays.json": f"{FIRST}\n{SECOND}",
    "arrays-in-a-line.json": FIRST + SECOND,
    "array-per-line.jsonl": "\n".join(json.dumps([row]) for row in ROWS),
    "array-then-lines.json": FIRST + "\n\n" + LINES.split("\n", 3)[3],
    "arrays-and-empty.jsonl": f" []\n{FIRST}[]\r\n\n{SECOND}\n[]",
    "marked.jsonl": b"\xef\xbb\xbf" + LINES.replace("\n", "\r\n").encode(),
    "no-end.jsonl": LINES.rstrip(),
    "ragged.csv": TABLE.replace("text 3\n", "text 3,,\n"),
    "numbers.jsonl": LINES.replace('"id": 3', '"id": NaN'),
}
"""Files that hold the same six texts."""


@pytest.mark.parametrize("block", [7, files.BLOCK])
@pytest.mark.parametrize("name", READ)
def test_all_records_are_read(tmp_path: Path, monkeypatch, name: str, block: int) -> None:
    """By whatever name and however many JSON values follow each other, also from a folder."""
    monkeypatch.setattr(files, "BLOCK", block)
    content = READ[name]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    assert texts(tmp_path / name) == texts(tmp_path) == texts(f"{tmp_path}/*") == TEXTS


REFUSED: dict[str, tuple[str | bytes, str]] = {
    "half.json": (FIRST + '\n{"text": "sec', "half.json, line 2, is neither .*Unterminated string"),
    "blank.jsonl": ('{"text": "x"}\n\n{"te', "blank.jsonl, line 3, is neither"),
    "bytes.jsonl": (b'{"text": "a"}\n{"text": "\xff"}', "bytes.jsonl is not UTF-8 at byte 24"),
    "junk.json": (FIRST + "]", "junk.json, line 1, is neither"),
    "half-array.json": (FIRST + '\n[{"text": "x"}, ', "half-array.json, record 5, is neither"),
    "after-lines.jsonl": (LINES + FIRST, "after-lines.jsonl, line 7 has a list"),
    "pretty.json": (json.dumps(ROWS[0], indent=2) * 2, "pretty.json, line 1, is neither"),
    "python.jsonl": (repr(ROWS[0]), "python.jsonl, line 1, is neither"),
    "mac.jsonl": (LINES.replace("\n", "\r"), "mac.jsonl, line 1, is neither"),
    "deep.json": ("[" * 200_000, "deep.json, record 1, is neither"),
    "digits.json": ('[{"text": "a", "id": ' + "1" * 5000 + "}]", "digits.json, record 1, is neit"),
    "twice.jsonl": ('{"text": "a", "text": "b"}', "twice.jsonl, line 1, has 'text' 2 times"),
    "twice.json": ('[{"text": "a", "text": "b"}]', "twice.json, record 1, has 'text' 2 times"),
    "data.json": (json.dumps({"version": 1, "data": ROWS}), 'line 1 has {"data": list, "version"'),
    "number.jsonl": ('{"text": 5}', 'number.jsonl, line 1 has {"text": int}'),
    "nan.jsonl": ('{"text": NaN}', 'nan.jsonl, line 1 has {"text": float}'),
    "list.jsonl": ('{"text": ["a", "b"]}', 'list.jsonl, line 1 has {"text": list}'),
    "null.jsonl": (LINES + '{"text": null}', 'null.jsonl, line 7 has {"text": NoneType}'),
    "surrogate.jsonl": ('{"text": "a\\ud800b"}', "surrogate.jsonl, line 1 has half a character"),
    "semicolon.csv": (
        TABLE.replace(",", ";"),
        "'id;text'; write ',' between .* of ';'",
    ),
    "tabs.csv": (TABLE.replace(",", "\t"), r"one column, 'id\\ttext'; write ','"),
    "commas.tsv": (TABLE, r"one column, 'id,text'; write '\\t' between .* of ','"),
    "more.csv": (
        TABLE + "6,hello, world\n",
        "more.csv, line 8, has 3 values in 2 columns",
    ),
    "twice.csv": ("text,text\na,b\n", "twice.csv has 'text' 2 times"),
    "mac.csv": (TABLE.replace("\n", "\r"), r"mac.csv, line 1: a line ends in \\r alone"),
    "others.csv": ("title,body\na,b\n", r'line 2 has {"body": str, "title": str}'),
    "behind.csv": ('text\n"a"b\n', "behind.csv, line 2: '[,]' expected after"),
    "open.csv": ('text\n"a\n', "open.csv, line 3: unexpected end of data"),
    "short.tsv": ("n\ttext\n1\tx\n2\n", r'short.tsv, line 3 has {"n": str, "text": NoneType}'),
    "list.parquet": (as_parquet(text=[["a", "b"]]), 'row 1 has {"text": list}'),
    "bytes.parquet": (as_parquet(text=[b"a"]), 'row 1 has {"text": bytes}'),
    "little.txt": ("ü".encode("utf-16"), "is not UTF-8 at byte 0; it is UTF-16 by .* -f utf-16 "),
    "big.txt": (b"\xfe\xff\x00a", "is not UTF-8 at byte 0; it is UTF-16 by .* -f utf-16 "),
    "four.txt": (b"\x00\x00\xfe\xff" + b"\x00\x00\x00a", "it is UTF-32 by .* -f utf-32 "),
    "le.txt": ("hello world ".encode("utf-16-le"), "seems to be UTF-16LE; .* -f utf-16le "),
    "be.txt": ("hello world ".encode("utf-16-be"), "seems to be UTF-16BE; .* -f utf-16be "),
    "le.jsonl": (LINES.encode("utf-16-le"), "seems to be UTF-16LE"),
    "le.csv.gz": (gzip.compress(TABLE.encode("utf-16-le")), "seems to be UTF-16LE"),
    "russian.txt": ("привет, мир".encode("utf-16-le"), "seems to be UTF-16LE"),
    "chinese.txt": (
        "你好，世界！中文文本。 \n".encode("utf-16-be"),
        "it seems to be UTF-16BE",
    ),
    "le4.txt": ("hello".encode("utf-32-le"), "seems to be UTF-32LE"),
    "be4.txt": ("hello".encode("utf-32-be"), "seems to be UTF-32BE"),
    "latin.txt": (
        GERMAN.encode("latin-1"),
        "at byte 2; it may be Windows-1252 .* -f cp1252 ",
    ),
    "one-bad.txt": (
        GERMAN.encode() + b"\xff.",
        "what is before is: mend .*iconv -c -f utf-8 ",
    ),
    "cut.txt": (b"text \xe2\x82", "cut.txt is not UTF-8 at byte 5"),
    "zip.txt": (as_zip(), r"zip.txt holds a ZIP archive, not text; unpack it \(unzip\)"),
    "sheet.csv": (as_zip(), "sheet.csv holds a ZIP archive"),
    "zip.jsonl": (as_zip(), "zip.jsonl holds a ZIP archive"),
    "gz.txt": (gzip.compress(b"text"), "gz.txt holds gzip, not text; let its name end in .gz"),
    "twice.txt.gz": (gzip.compress(gzip.compress(b"text")), "twice.txt.gz holds gzip"),
    "zst.jsonl": (as_zstandard(b"text"), "zst.jsonl holds Zstandard"),
    "rows.txt": (as_parquet(text=TEXTS), "rows.txt holds Parquet, not text; .*end in .parquet"),
    "tar.txt": (b"\0" * 257 + b"ustar" + b"\0" * 250, "tar.txt holds a tar archive"),
    "pages.txt": (b"%PDF-1.7\n", "pages.txt holds a PDF"),
    "text.parquet": ("text", "cannot read .*text.parquet"),
    "plain.txt.gz": ("text", "cannot read .*plain.txt.gz"),
    "cut.jsonl.gz": (gzip.compress(os.urandom(999))[:-40], "cannot read .*cut.jsonl.gz"),
    "none.txt.zst": (b"none", "cannot read .*none.txt.zst"),
    "cut.txt.zst": (as_zstandard(b"some text " * 10_000)[:-5], "cannot read .*cut.txt.zst"),
    "lines.txt": ("\n" * 1000, "lines.txt is empty; leave it out"),
    "zeros.txt": ("\0" * 1000, "zeros.txt is empty; leave it out"),
    "none.parquet": (as_parquet(text=pyarrow.array([], "string")), r"no text in .*records: 1 \("),
    "empty.jsonl": ('{"text": ""}\n' * 5, r"without text: 5 \(.*line 1; .*line 2; .*line 3; …\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str) -> None:
    content, message = REFUSED[name]
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        texts(tmp_path / name)


@pytest.mark.parametrize(
    "text",
    [
        "words\0\0\0 " * 300,
        "one\0two\0three\0",
        "hello\0",
        "\0" * 999 + "a",
        "a\nb\n" * 99,
        "\n" * 99 + "x",
        "BZh is no archive",
        "привет\0",
    ],
)
def test_text_that_only_looks_odd_is_read(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.txt").write_text(text)
    assert texts(tmp_path / "a.txt") == [text]


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A folder of two texts, and of all that is found beside texts."""
    for name in (
        *("A.TXT", "in/b.txt"),
        *("._A.TXT", ".DS_Store", ".ipynb_checkpoints/b-checkpoint.txt", "in/.vscode/x.json"),
        *("__MACOSX/._A.TXT", "__MACOSX/b.txt"),
        *("notes.md", "in/Thumbs.db", "in/desktop.ini", "in/b.txt~"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "gone.txt").symlink_to("nowhere")
    (tmp_path / "linked").symlink_to("in")
    return tmp_path


def test_what_a_folder_leaves_out_is_counted(mixed: Path) -> None:
    with pytest.warns(LeftOutWarning) as said:
        assert texts(mixed) == ["A.TXT", "in/b.txt"]
    (line,) = {str(one.message) for one in said}
    assert line.startswith(f"left out of {mixed}: hidden files: 6 (.DS_Store; ._A.TXT; .ipynb_")
    assert "files of other kinds: 4 (in/Thumbs.db; in/b.txt~; in/desktop.ini; …)" in line
    assert "broken links and devices: 1 (gone.txt)" in line
    assert "folders that are not entered: 1 (linked)" in line


@pytest.mark.parametrize(
    ("pattern", "found", "line"),
    [
        ("*", ["A.TXT"], r"hidden files: 4 \(.*not entered: 2 \(.*in; .*linked\)"),
        (
            "**/*.txt",
            ["in/b.txt"],
            r"hidden files: 2 \(.*links to files that are read: 1 \(.*d/b.txt",
        ),
        ("in/.vscode/*", None, ""),
        ("__MACOSX/*", ["__MACOSX/b.txt"], r"hidden files: 1 \(.*\._A.TXT\)"),
        (".*/*.txt", [".ipynb_checkpoints/b-checkpoint.txt"], None),
    ],
)
def test_a_glob_finds_what_is_hidden_only_where_it_says_so(
    mixed: Path, pattern: str, found: list[str] | None, line: str | None
) -> None:
    (mixed / "in/.vscode/x.json").write_text('{"text": "hidden"}')
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert texts(f"{mixed}/{pattern}") == (found or ["hidden"])
    assert bool(said) == bool(line)
    assert not line or re.search(line, str(said[0].message))


@pytest.mark.parametrize("name", ["._A.TXT", "__MACOSX/b.txt", "notes.md", "in/b.txt~"])
def test_what_is_named_is_read(mixed: Path, name: str) -> None:
    assert texts(mixed / name) == [name]


def test_a_file_of_several_names_is_read_once(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").symlink_to("a.txt")
    (tmp_path / "c.txt").hardlink_to(tmp_path / "a.txt")
    with pytest.warns(LeftOutWarning, match=r"links to files that are read: 2 \(b.txt; c.txt\)"):
        assert texts(tmp_path) == ["a"]


def test_a_hidden_folder_that_is_named_is_searched(mixed: Path) -> None:
    assert texts(mixed / ".ipynb_checkpoints") == [".ipynb_checkpoints/b-checkpoint.txt"]
    (mixed / "in/b.txt").unlink()
    with pytest.raises(DataError, match=r"no text found .*left out: .*other kinds: 3 \(Thumbs.db"):
        paths(str(mixed / "in"))


def test_records_without_text_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(LINES + '{"text": ""}\n' * 2)
    (tmp_path / "b.csv").write_text("text\n")
    (tmp_path / "c.json").write_text("[]")
    with pytest.warns(
        LeftOutWarning, match="left out of the text: records without text: 2"
    ) as said:
        assert texts(tmp_path) == TEXTS
    assert f"files without records: 2 ({tmp_path}/b.csv; {tmp_path}/c.json)" in str(said[0].message)


NAME = os.fsdecode(b"a\xff.txt")


def test_names_that_are_not_utf8_are_stored(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {NAME: ["ü", NAME]})
    append_row(tmp_path / "a.jsonl", {"step": 1, NAME: 2.0})
    assert (tmp_path / "a.json").read_text(encoding="utf-8").count("\\udcff") == 2
    assert read_json(tmp_path / "a.json") == {NAME: ["ü", NAME]}
    assert read_rows(tmp_path / "a.jsonl") == [{"step": 1, NAME: 2.0}]


TINY = "--layers=1 --width=16 --steps=1 --length=16 --batch=2 --sample=0".split()  # noqa: SIM905


def test_the_command_trains_on_a_file_and_says_what_it_leaves_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch
) -> None:
    """A name that is not UTF-8 is printable and stored; lines go to the terminal."""
    monkeypatch.chdir(tmp_path)
    Path("d").mkdir()
    (Path("d") / NAME).write_text("the quick brown fox " * 300)
    Path("d/more.jsonl").write_text('{"text": ""}\n{"text": "x"}\n')
    Path("d/notes.md").write_text("notes")
    with pytest.warns(LeftOutWarning) as said:
        assert main(["train", "--data", f"d/{NAME}", "d", *TINY]) == 0
    assert {str(one.message) for one in said} == {
        "left out of d: files of other kinds: 1 (notes.md)",
        "left out of the text: records without text: 1 (d/more.jsonl, line 1)",
    }
    assert "runs/a\ufffd-metala" in capsys.readouterr().out
    stored = read_json(Path("runs/a\ufffd-metala/data/index.json"))
    assert stored["texts"]["sources"][0]["path"] == f"d/{NAME}"
