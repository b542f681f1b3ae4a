"""What the paper reports for the same method, data, number of clients and alpha; on its own backbone."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from apfl.experiments.record import Record
from apfl.report.sheet import Column, Row

__all__ = ["SOURCE", "published"]

# How the paper's datasets are called in names of files and of the Hub.
NAMES = {"cifar100": r"cifar[-_]?100(?!\d)", "imagenet-r": r"imagenet[-_]?r(?![a-z])"}


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads((files("apfl.report") / "published.toml").read_text())


SOURCE: str = _tables()["source"]


class _Place(NamedTuple):
    """Which of the paper's settings a federation is."""

    dataset: str
    n_clients: int
    alpha: int  # its place among the paper's


def published(row: Row, column: Column, records: Sequence[Record] = ()) -> float | None:
    """The paper's accuracy as a fraction; None where there is none.

    A row that is one balance of several is looked up in Table 2, any other in Table 1: a method's only row, or the
    tuned one of several. ``records`` are the row's; of another width than the paper's they are not its method.
    """
    place = _place(column)
    if place is None or (row.method == "apfl_paper" and not _has_papers_width(records)):
        return None
    if not row.differs or "tuned" in row.differs:
        percent = _table1(row.method, place)
    elif set(row.differs) == {"balance"}:
        percent = _table2(row.method, row.differs["balance"], place)
    else:
        percent = None  # some other variant than the paper's
    return None if percent is None else float(percent) / 100


def _place(column: Column) -> _Place | None:
    tables = _tables()
    dataset = next((name for name, spelt in NAMES.items() if re.search(spelt, column.data.lower())), None)
    dealt_alike = column.partition == "dirichlet" and column.all_measured
    known = column.n_clients in tables["clients"] and column.alpha in tables["alphas"]
    if dataset is None or not dealt_alike or not known:
        return None
    return _Place(dataset, column.n_clients, tables["alphas"].index(column.alpha))


def _has_papers_width(records: Sequence[Record]) -> bool:
    widths = {record.settings.get(name) for record in records for name in ("d_primary", "d_refinement")}
    return widths <= {_tables()["width"]}


def _table1(method: str, place: _Place) -> float | None:
    tables = _tables()
    by_clients = tables["table1"][place.dataset].get(method)
    return None if by_clients is None else by_clients[tables["clients"].index(place.n_clients)][place.alpha]


def _table2(method: str, balance: Any, place: _Place) -> float | None:
    table = _tables()["table2"]
    if method != "apfl_paper" or place.n_clients != 50:
        return None
    if balance == 0:  # the primary stream alone
        return table["primary"][place.dataset][place.alpha]  # type: ignore[no-any-return]
    by_balance = dict(zip(table["balances"], table[place.dataset][place.alpha], strict=True))
    return by_balance.get(balance)
