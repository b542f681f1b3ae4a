"""Whether a run fits, known before it starts."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from apfl.errors import InputError

__all__ = ["available", "check_width", "needed"]

log = logging.getLogger(__name__)


def available(device: torch.device) -> int | None:
    """Bytes that can still be had on ``device``; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None


def needed(width: int, n_rows: int, workers: int) -> int:
    """Peak bytes of the primary stream: a sum for each worker, the system, its factor, and all activated rows.

    Sums, system and factor are float64 and width x width; rows are float32. One eighth is added for all else.
    """
    return int(1.125 * (8 * width**2 * (workers + 2) + 4 * width * n_rows))


def check_width(width: int, n_rows: int, workers: int, device: torch.device) -> None:
    """Say what a run of this width takes; refuse it, with the widest that fits, if there is not that much."""
    take, have = needed(width, n_rows, workers), available(device)
    if take > 1e9:  # below that nobody has to plan for it
        log.info("width %d for %d rows takes about %.1f GB of memory", width, n_rows, take / 1e9)
    if have is None or take <= have:
        return
    fits = next((w for w in (2**power for power in range(20, 3, -1)) if needed(w, n_rows, workers) <= have), None)
    remedy = f"the widest power of two that fits is d_primary={fits}" if fits else "use fewer rows or another machine"
    want = f"d_primary={width} with {n_rows} rows needs about {take / 1e9:.1f} GB"
    raise InputError(f"{want} and {have / 1e9:.1f} GB are free: {remedy}")
