"""docs/tables.md, computed from the code alone."""

from __future__ import annotations

from fastweights.analysis.tables import TABLES, page
from pages.page import Page

PAGE = Page("tables", lambda _: page(table() for table in TABLES.values()) + "\n")
