"""Results for other programs: one line for each method and federation."""

from __future__ import annotations

import csv
import io
import json
from typing import Any

from apfl.report.results import Results

__all__ = ["as_csv"]


def as_csv(results: Results, digits: int = 1) -> str:
    """One line for each method and federation, all digits."""
    stream = io.StringIO()
    heads = "method,settings,data,data_sha256,partition,n_clients,alpha,metric,n_seeds,seeds,mean,std,place,paper"
    writer = csv.writer(stream, lineterminator="\n")
    apart_heads = "difference,low,high,p,p_holm,seeds_compared,interval_speaks_of"
    writer.writerow([*heads.split(","), *apart_heads.split(",")])
    for row in results.rows:
        for column in results.columns:
            cell, apart = results.cells.get((row, column)), results.differences.get((row, column))
            if cell is None:
                continue
            first = results.sheet.cells[row, column][0]
            seeds = " ".join(map(str, cell.seeds))
            line: list[Any] = [row.method, json.dumps(first.settings), column.data, first.data_sha256, column.partition]
            line += [column.n_clients, column.alpha, results.metric.name, len(cell.seeds), seeds]
            line += [cell.mean, cell.std, cell.place or None, cell.published]
            if apart is not None:
                line += [apart.value, apart.low, apart.high, apart.p, apart.p_holm, apart.n_seeds, apart.speaks_of]
            writer.writerow(line + [None] * (len(heads.split(",")) + 7 - len(line)))
    return stream.getvalue()
