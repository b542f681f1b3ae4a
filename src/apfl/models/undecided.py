"""Rows for which a model names no class: the one rule for predictions, metrics and the estimator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["REASONS", "in_words", "undecided"]

REASONS = ("decided", "every feature is zero", "a score is NaN or infinite", "every class has the same score")
ROWS_SHOWN = 5


def undecided(model: Any, features: Tensor, scores: Tensor) -> Tensor:
    """For each row the place of its reason in `REASONS`, (n,); 0 if the model names a class.

    A score of minus infinity rules a class out and is no reason. A row of zeros is decided unless the model brings rows
    to one length (``normalise`` row or root), where zeros are no direction.

    >>> undecided(None, torch.ones(3, 2), torch.tensor([[1.0, 2.0], [1.0, 1.0], [1.0, torch.nan]])).tolist()
    [0, 3, 2]
    """
    allowed = ~torch.isneginf(scores)
    highest, lowest = scores.amax(1), torch.where(allowed, scores, torch.inf).amin(1)
    equal = (highest == lowest) & (allowed.sum(1) > 1)
    reason = torch.where(equal, 3, 0)
    reason[~highest.isfinite()] = 2  # also NaN, which amax passes on
    if getattr(getattr(model, "normaliser", None), "how", None) in ("row", "root"):
        reason[~features.any(1)] = 1
    return reason


def in_words(reasons: Tensor) -> str:
    """How many rows have no decision, which and why.

    >>> in_words(torch.tensor([0, 1, 0, 3, 3]))
    '3 of 5 rows have no decision: row 1 (every feature is zero); rows 3, 4 (every class has the same score)'
    """
    parts = []
    for code in torch.unique(reasons[reasons > 0]).tolist():
        rows = (reasons == code).nonzero().flatten().tolist()
        shown = ", ".join(map(str, rows[:ROWS_SHOWN])) + (", ..." if len(rows) > ROWS_SHOWN else "")
        parts.append(f"row{'s' if len(rows) > 1 else ''} {shown} ({REASONS[code]})")
    n = int((reasons > 0).sum())
    return f"{n} of {len(reasons)} rows {'has' if n == 1 else 'have'} no decision: {'; '.join(parts)}"
