"""What a cell takes, before it is run: a guess of its time within a factor of about three, and its memory."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from apfl.data.federation import Dataset
from apfl.experiments.cells import Cell
from apfl.experiments.tuning import ROUNDS, grid
from apfl.machine import needed
from apfl.methods._training import Training
from apfl.methods.apfl import APFL

__all__ = ["peak_bytes", "rate", "seconds"]

INTERPRETER = 500_000_000  # bytes of Python with torch
EFFICIENCY = 0.4  # of the speed of one large product


def rate(threads: int) -> float:
    """Multiply-adds in a second of one large float32 product, measured now."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        a = torch.ones(1024, 1024)
        a @ a
        start = time.perf_counter()
        for _ in range(5):
            a @ a
        return 5 * 1024**3 / (time.perf_counter() - start)
    finally:
        torch.set_num_threads(before)


def seconds(cell: Cell, dataset: Dataset, speed: float) -> float:
    """Training and measuring, at ``speed`` multiply-adds a second; the tuning of a cell that is tuned not included."""
    return _products(cell, dataset) / (EFFICIENCY * speed)


def tuning_seconds(cell: Cell, dataset: Dataset, speed: float) -> float:
    """What choosing the settings takes, once for all seeds."""
    points = len(grid(cell.method, cell.tune))
    n_rounds = getattr(cell.method, "n_rounds", ROUNDS)
    return points * seconds(cell, dataset, speed) * min(1.0, ROUNDS / n_rounds)


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
    return needed(max(_widths(cell, dataset)), n_rows, workers=1)


def _products(cell: Cell, dataset: Dataset) -> float:
    """Multiply-adds."""
    (n_rows, n_features), n_classes = dataset.features.shape, len(dataset.class_names)
    if isinstance(cell.method, Training):
        passes = cell.method.epochs * cell.method.n_rounds * cell.method.participation
        passes += getattr(cell.method, "finetune_epochs", 0)
        return (
            2 * n_rows * n_features * n_classes * (passes + cell.method.n_rounds / 3)
        )  # forwards, backwards, measured
    primary, refinement = _widths(cell, dataset)
    each = n_rows / (cell.protocol.n_clients or 10)
    maps = n_rows * n_features * (primary + refinement)
    sums = 0.75 * n_rows * primary**2 + primary**3 / 3  # of the training rows, and the solution
    own = n_rows * min(each, refinement) * max(each, refinement)
    chooses = "auto" in (getattr(cell.method, "beta", None), getattr(cell.method, "tau", None))
    return maps + (sums + own if not chooses else sums + primary**3 + 3 * own)


def _widths(cell: Cell, dataset: Dataset) -> tuple[int, int]:
    """d_P and d_R; a method without a map has the features' own width."""
    n_rows, n_features = dataset.features.shape
    if isinstance(cell.method, APFL):
        return cell.method.widths(n_rows, n_features)
    primary = getattr(cell.method, "d_primary", getattr(cell.method, "d", n_features))
    return int(primary), int(getattr(cell.method, "d_refinement", 0))
