"""What a file holds instead of UTF-8 text, told from its bytes, and what to do with it."""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple


class _Signature(NamedTuple):
    """Bytes at a place of a file by which its format is known, in words, and what to do."""

    begin: bytes
    what: str
    then: str
    at: int = 0


_SIGNATURES = (
    _Signature(b"PK\x03\x04", "a ZIP archive", "unpack it (unzip), or save its text as .txt"),
    _Signature(b"\x1f\x8b", "gzip", "let its name end in .gz, once"),
    _Signature(b"\x28\xb5\x2f\xfd", "Zstandard", "let its name end in .zst, once"),
    _Signature(b"BZh", "bzip2", "unpack it (bunzip2)"),
    _Signature(b"\xfd7zXZ\x00", "xz", "unpack it (unxz)"),
    _Signature(b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive", "unpack it (7z x)"),
    _Signature(b"ustar", "a tar archive", "unpack it (tar -xf)", 257),
    _Signature(b"PAR1\x15", "Parquet", "let its name end in .parquet"),
    _Signature(b"ARROW1\x00", "Arrow", "save it as Parquet"),
    _Signature(b"SQLite format 3\x00", "an SQLite database", "export its rows as .csv"),
    _Signature(b"%PDF-", "a PDF", "save its text as .txt (pdftotext)"),
    _Signature(b"\x00\x05\x16\x07", "attributes of another file, from a Mac", "leave it out"),
)
_BZIP2 = b"1AY&SY"  # behind "BZh" and a digit, with which a text might begin
_MARKS = {
    b"\xff\xfe\x00\x00": "utf-32",
    b"\x00\x00\xfe\xff": "utf-32",
    b"\xff\xfe": "utf-16",
    b"\xfe\xff": "utf-16",
}
_CONTROLS = bytes(range(32))
_SAMPLE = 1 << 16


def find_signature(begin: bytes) -> str | None:
    """What a file that begins with these bytes holds, and what to do; None of text."""
    for signature in _SIGNATURES:
        if begin.startswith(signature.begin, signature.at):
            if signature.begin == b"BZh" and not begin.startswith(_BZIP2, 4):
                continue
            return f"holds {signature.what}, not text; {signature.then}"
    return None


def guess_wide_encoding(block: bytes) -> str | None:
    """The encoding of text that passes for UTF-8 but has a 0 in every second or fourth byte, or
    another control character where the alphabet is another."""
    if 0 not in block:
        return None
    for name in ("utf-32le", "utf-32be"):
        with suppress(UnicodeDecodeError):
            text = block[:_SAMPLE][: len(block) // 4 * 4].decode(name)
            if text and "\x00" not in text:
                return name
    for name, half, other in _halves(block[:_SAMPLE]):
        controls = len(half) - len(half.translate(None, _CONTROLS))
        if 0 in half and 0 not in other and 10 * controls > 7 * len(half):
            return name
    return None


def explain_bytes(block: bytes, start: int) -> str:
    """What bytes that are not UTF-8 from `start` on may be, and what to do."""
    for mark, name in _MARKS.items():
        if block.startswith(mark):
            return f"it is {name.upper()} by its first bytes: {convert(name)}"
    # of UTF-16, one half of the spaces and line ends is 0
    halves = _halves(block[:_SAMPLE])
    spaced = (n for n, half, other in halves if 100 * half.count(0) > len(half) and 0 not in other)
    if name := guess_wide_encoding(block) or next(spaced, None):
        return f"it seems to be {name.upper()}: {convert(name)}"
    if not block[:start].isascii():
        return "what is before is: mend that place, or leave it out (iconv -c -f utf-8 -t utf-8)"
    if _is_windows_1252(block):
        return f"it may be Windows-1252 or Latin-1: {convert('cp1252')}"
    return "if it is text, convert it (iconv -f ENCODING -t utf-8)"


def convert(encoding: str) -> str:
    """Advice on text in this encoding."""
    return f"convert it (iconv -f {encoding} -t utf-8)"


def _halves(block: bytes) -> tuple[tuple[str, bytes, bytes], ...]:
    """The high bytes and the low ones by the order that they may have."""
    even, odd = block[::2], block[1::2]
    return ("utf-16le", odd, even), ("utf-16be", even, odd)


def _is_windows_1252(block: bytes) -> bool:
    try:
        block.decode("cp1252")
    except UnicodeDecodeError:
        return False
    return 0 not in block
