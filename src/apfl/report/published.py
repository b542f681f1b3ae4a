"""What the paper reports for the same method, data, number of clients and alpha; on its own backbone."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from apfl.experiments.record import Record
from apfl.report.sheet import Column, Row

__all__ = ["SOURCE", "published"]

# How the paper's datasets are called in names of files and of the Hub.
NAMES = {"cifar100": r"cifar[-_]?100(?!\d)", "imagenet-r": r"imagenet[-_]?r(?![a-z])"}


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads((files("apfl.report") / "published.toml").read_text())


SOURCE: str = _tables()["source"]


def published(row: Row, column: Column, records: Sequence[Record] = ()) -> float | None:
    """The paper's accuracy as a fraction; None where there is none.

    A row that is one balance of several is looked up in Table 2, any other in Table 1: a method's only row, or the
    tuned one of several. ``records`` are the row's; of another width than the paper's they are not its method.
    """
    tables = _tables()
    dataset = next((name for name, spelt in NAMES.items() if re.search(spelt, column.data.lower())), None)
    known = column.partition == "dirichlet" and column.all_measured and column.n_clients in tables["clients"]
    if dataset is None or not known or column.alpha not in tables["alphas"]:
        return None
    alpha = tables["alphas"].index(column.alpha)
    widths = {record.settings.get(name) for record in records for name in ("d_primary", "d_refinement")}
    if row.method == "apfl_paper" and widths - {tables["width"]}:
        return None
    tuned = "tuned" in row.differs
    if not tuned and set(row.differs) - {"balance"}:
        return None  # some other variant than the paper's
    if row.differs and not tuned:
        balances = tables["table2"]["balances"]
        if row.method == "apfl_paper" and column.n_clients == 50 and row.differs["balance"] == 0:
            return float(tables["table2"]["primary"][dataset][alpha]) / 100  # the primary stream alone
        if row.method != "apfl_paper" or column.n_clients != 50 or row.differs["balance"] not in balances:
            return None
        return float(tables["table2"][dataset][alpha][balances.index(row.differs["balance"])]) / 100
    own = tables["table1"][dataset].get(row.method)
    return None if own is None else float(own[tables["clients"].index(column.n_clients)][alpha]) / 100
