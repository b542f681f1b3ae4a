"""Points of a grid that agree in so much that they can be worked on together."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Any


def alike(points: Sequence[Any], without: Collection[str]) -> list[list[int]]:
    """The places of points that agree in all settings but those ``without``, in the order of their first.

    >>> from apfl import load_method
    >>> alike([load_method("fedavg", lr=lr, batch=batch) for lr in (0.1, 0.3) for batch in (16, 64)], without={"lr"})
    [[0, 2], [1, 3]]
    """
    groups: dict[str, list[int]] = {}
    for place, point in enumerate(points):
        common = {name: value for name, value in asdict(point).items() if name not in without}
        groups.setdefault(json.dumps(common), []).append(place)
    return list(groups.values())
