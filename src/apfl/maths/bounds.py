"""What a sum over clients may reveal: a sum with fewer rows than columns gives its rows away."""

from __future__ import annotations

from apfl.maths.landmarks import ROWS_FOR_EACH_COLUMN

__all__ = ["widest"]


def widest(n_rows: int) -> int:
    """The most columns of a map whose statistics are summed over so many rows, if nobody may read them off the sum.

    `examples/attacks.py` recovers rows from sums of fewer rows than columns, and none from one and a half times as
    many; four is what the covariance behind landmarks needs, too.

    >>> widest(4003)
    1000
    """
    return n_rows // ROWS_FOR_EACH_COLUMN
