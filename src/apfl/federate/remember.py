"""What a client remembers of the rows that it contributed, so that it notices when they change. It stays at the client.

The fingerprint does not depend on the order of the rows: a table that is exported in another order is the same rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from apfl.data.federation import Shard

__all__ = ["difference", "remembered"]

N_CLASSES = 8  # named in a difference


def remembered(rows: Shard, class_names: Sequence[str]) -> dict[str, Any]:
    """A fingerprint of the rows and their number in each class; no row can be read from it."""
    features, labels = rows.features.contiguous().cpu().numpy(), rows.labels.tolist()
    kind = f"{features.dtype} {features.shape[1]} "
    each = sorted(
        hashlib.sha256(f"{kind}{class_names[label]}\0".encode() + row.tobytes()).digest()
        for row, label in zip(features, labels, strict=True)
    )
    counts = torch.bincount(rows.labels, minlength=len(class_names)).tolist()
    present = {name: n for name, n in zip(class_names, counts, strict=True) if n}
    return {"rows": hashlib.sha256(b"".join(each)).hexdigest(), "counts": present}


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """How rows differ from those remembered, in words; None if they are the same."""
    if before.get("rows") == now["rows"]:
        return None
    if "counts" not in before:  # remembered by an earlier version
        return "other values, or another number of rows"
    then, present = before["counts"], now["counts"]
    moved = [name for name in sorted({*then, *present}) if then.get(name, 0) != present.get(name, 0)]
    if not moved:
        return f"{sum(present.values()):,} rows, as many of each class as then, with other values"
    shown = [f"{name} {present.get(name, 0)} ({then.get(name, 0)} then)" for name in moved[:N_CLASSES]]
    more = f", and classes besides: {len(moved) - N_CLASSES}" if len(moved) > N_CLASSES else ""
    return f"{sum(present.values()):,} rows, {sum(then.values()):,} then; {', '.join(shown)}{more}"
