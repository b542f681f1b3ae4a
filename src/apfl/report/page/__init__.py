"""One HTML page of everything in some records: opens offline, asks nothing of anyone.

Text from records goes through the template's escaping; drawings are SVG that matplotlib escaped. The page's
Content-Security-Policy forbids every request and every script but its own.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterable
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined

from apfl.experiments.record import Record
from apfl.report import TITLE
from apfl.report.figures.style import looks
from apfl.report.page import parts
from apfl.report.page.tables import tables
from apfl.report.published import SOURCE
from apfl.report.results import results
from apfl.report.sheet import gather
from apfl.report.summary import summary

__all__ = ["page"]


def page(
    records: Iterable[Record],
    *,
    against: str | None = None,
    title: str = TITLE,
    on_federation: Callable[[int, int], None] = lambda done, of: None,
) -> str:
    """The page as text; ``on_federation`` is told how many of how many are drawn."""
    sheet = gather(records)
    found = results(sheet, against=against)
    look = looks(sheet.rows, found.ours)
    federations = []
    for i, column in enumerate(sheet.columns):
        on_federation(i, len(sheet.columns))
        federations.append(parts.federation(found, column, f"federation-{i}", look))
    css, js = (_asset(name) for name in ("page.css", "page.js"))
    return _rendered(
        title=title,
        summary=summary(found),
        facts=parts.overview(sheet),
        tables=tables(found, SOURCE),
        sweeps=parts.sweeps(sheet, look),
        federations=federations,
        settings=parts.settings(found),
        css=css,
        js=js,
        script_hash=f"sha256-{base64.b64encode(hashlib.sha256(js.encode()).digest()).decode()}",
        version=version("apfl"),
        n_records=len(sheet.all),
    )


def _rendered(**values: Any) -> str:
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(_asset("page.html.j2"))
    return template.render(values)


def _asset(name: str) -> str:
    return (files("apfl.report.page") / name).read_text(encoding="utf-8")
