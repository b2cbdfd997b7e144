"""Write all pages, and the pictures on them into docs/measured: ``python -m pages`` in
benchmarks/.
"""

from __future__ import annotations

from pages import PAGES
from pages.page import PICTURES, Page


def main() -> None:
    for page in PAGES:
        write(page)


def write(page: Page) -> None:
    before = page.path.read_text(encoding="utf-8")
    if (text := page.render(before)) != before:
        page.path.write_text(text, encoding="utf-8")
    for name, draw in page.pictures.items():
        picture = PICTURES / name
        picture.parent.mkdir(parents=True, exist_ok=True)
        picture.write_bytes(draw())


if __name__ == "__main__":
    main()
