"""What cells take before they are run: memory, which decides how many are run at a time, and what `apfl` costs."""

from __future__ import annotations

from collections.abc import Sequence

from apfl.data.federation import Dataset
from apfl.data.protocol import Protocol
from apfl.experiments.cells import Cell
from apfl.experiments.cost import RUN, cost
from apfl.experiments.operations import Size
from apfl.experiments.rates import Rates, measured_rates
from apfl.experiments.tuning import grid
from apfl.maths.memory import INTERPRETER, of_run
from apfl.methods._training import Training
from apfl.methods.apfl import APFL

__all__ = ["peak_bytes", "told_costs"]


def peak_bytes(cells: Sequence[Cell], dataset: Dataset) -> int:
    """The most that one process holds at a time."""
    n_rows, n_features = dataset.features.shape
    rows = 2 * 4 * n_rows * n_features  # the dataset, and the federation made of it
    return INTERPRETER + rows + max(_method_bytes(cell, dataset) for cell in cells)


def told_costs(cells: Sequence[Cell], dataset: Dataset) -> list[str]:
    """What each federation with `apfl` in these cells would cost, a line for each; by a short measurement of rates."""
    n_rows, n_features = dataset.features.shape
    sizes: dict[tuple[int, APFL], None] = {}
    for cell in cells:
        if isinstance(cell.method, APFL) and cell.protocol.n_clients:
            sizes[cell.protocol.n_clients, cell.method] = None
    rates: dict[int, Rates] = {}
    told = []
    for n_clients, method in sizes:
        rows = max(n_clients, int((1 - Protocol.test_fraction) * n_rows))
        own = cost(
            Size(rows, n_features, len(dataset.class_names), n_clients, method.widths(rows, n_features)[0]), method
        )
        if own.width not in rates:
            rates[own.width] = measured_rates(own.width)
        seconds = own.seconds(rates[own.width], 1.0)[RUN]
        told.append(
            f"apfl with {n_clients} clients, width {own.width}: about {seconds:.1f} s on one core; a client sends "
            f"{own.up / 1e6:.2f} MB at most and receives {own.down / 1e6:.2f} MB"
        )
    return told


def _method_bytes(cell: Cell, dataset: Dataset) -> int:
    n_rows, n_features = dataset.features.shape
    if isinstance(cell.method, Training):
        heads = (cell.protocol.n_clients or 100) * n_features * len(dataset.class_names) * 4
        return 4 * n_rows * n_features + 4 * heads * len(grid(cell.method, cell.tune) if cell.tune else [0])
    return of_run(max(cell.method.widths(n_rows, n_features)), n_rows, workers=1)
