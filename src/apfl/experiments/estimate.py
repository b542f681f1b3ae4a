"""The memory that cells take, before they are run: it decides how many are run at a time."""

from __future__ import annotations

from collections.abc import Sequence

from apfl.data.federation import Dataset
from apfl.experiments.cells import Cell
from apfl.experiments.tuning import grid
from apfl.maths.machine import needed
from apfl.methods._training import Training

__all__ = ["peak_bytes"]

INTERPRETER = 500_000_000  # bytes of Python with torch


def peak_bytes(cells: Sequence[Cell], dataset: Dataset) -> int:
    """The most that one process holds at a time."""
    n_rows, n_features = dataset.features.shape
    rows = 2 * 4 * n_rows * n_features  # the dataset, and the federation made of it
    return INTERPRETER + rows + max(_method_bytes(cell, dataset) for cell in cells)


def _method_bytes(cell: Cell, dataset: Dataset) -> int:
    n_rows, n_features = dataset.features.shape
    if isinstance(cell.method, Training):
        heads = (cell.protocol.n_clients or 100) * n_features * len(dataset.class_names) * 4
        return 4 * n_rows * n_features + 4 * heads * len(grid(cell.method, cell.tune) if cell.tune else [0])
    return needed(max(cell.method.widths(n_rows, n_features)), n_rows, workers=1)
