"""Records as something to look at."""

from __future__ import annotations

__all__ = ["TITLE"]

TITLE = "Personalised federated learning: results"  # of a page, unless another one is given
