"""What a user should hear about the columns of a table before a run: which are features, which are not, and scales."""

from __future__ import annotations

import numpy as np

from apfl.data.columns import is_identifier
from apfl.data.federation import Dataset
from apfl.data.protocol import Protocol, feature_names, named_columns
from apfl.data.tables import listed

__all__ = ["hints"]

MOST_SHOWN = 60  # named columns; embeddings are wider
SCALES_DIFFER = 100.0  # between the largest and the smallest standard deviation


def hints(dataset: Dataset, protocol: Protocol) -> list[str]:
    """One sentence each; none for data that is not a table of named columns."""
    names = feature_names(dataset, protocol)
    if not names:
        return []
    if dataset.raw is not None:
        return [f"columns to encode from the sums of training rows: {listed(names, MOST_SHOWN)}"]
    return [f"features: {listed(names, MOST_SHOWN)}", *_left_out(dataset, protocol), *_scales(dataset, names)]


def _left_out(dataset: Dataset, protocol: Protocol) -> list[str]:
    used = {*dataset.feature_names, *named_columns(protocol)}
    rest = {name: column for name, column in dataset.columns.items() if name not in used}
    numbers = [name for name, column in rest.items() if column.dtype.kind in "iuf"]
    left_out = {
        "being no numbers: {} (--encode auto makes features of them)": [n for n in rest if n not in numbers],
        "being identifiers by their names: {} (--features takes any)": [n for n in numbers if is_identifier(n)],
        "though numbers: {} (--features takes any)": [n for n in numbers if not is_identifier(n)],
    }
    return [f"not features, {why.format(listed(names))}" for why, names in left_out.items() if names]


def _scales(dataset: Dataset, names: list[str]) -> list[str]:
    values = dataset.features[:, [dataset.feature_names.index(name) for name in names]]
    spread = values.double().std(0, correction=0).numpy()
    moving = np.flatnonzero(spread > 0)
    if not len(moving):
        return []
    small, large = (int(moving[at(spread[moving])]) for at in (np.argmin, np.argmax))
    if spread[large] < SCALES_DIFFER * spread[small]:
        return []
    return [
        f"scales differ: {names[large]} varies by {spread[large]:.3g}, {names[small]} by {spread[small]:.3g}; apfl "
        "scales columns by itself, for other methods add --set METHOD.normalise=standardise"
    ]
