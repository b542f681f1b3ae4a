"""The figures there are, known without drawing any."""

from __future__ import annotations

__all__ = ["FIGURES"]

FIGURES = {
    "curves": "accuracy after each round against rounds, seconds and bytes (the paper's Figures 3 and 4)",
    "rounds": "accuracy against rounds",
    "seconds": "accuracy against seconds",
    "bytes": "accuracy against bytes",
    "overhead": "seconds and bytes spent after each round (the paper's Figures 5 and 6)",
    "cost": "final accuracy against seconds and bytes",
    "pareto": "final accuracy against bytes, with the number of exchanges; the front is joined and named",
    "clients": "every client's accuracy, by method",
    "gains": "what each client gained over the primary stream and over going alone",
    "partition": "training rows of each class at each client",
    "tuning": "the surface that beta and balance were chosen from, and the curve of gamma",
    "sensitivity": "accuracy against one setting, --x",
}
