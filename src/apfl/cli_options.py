"""Options that several commands read alike."""

from __future__ import annotations

import torch

from apfl.errors import InputError

__all__ = ["device_of", "seeds_of"]


def seeds_of(text: str) -> list[int]:
    """The numbers of --seeds."""
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--seeds {text!r} given; expected whole numbers with commas, for example 0,1,2") from None
    if min(seeds) < 0 or len(set(seeds)) < len(seeds):
        raise InputError(f"--seeds {text!r} given; they must be 0 or more and differ from each other")
    return seeds


def device_of(name: str) -> torch.device:
    """The device of --device."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or not (index == "" or index.isdigit()):
        raise InputError(f"--device {name} given; allowed are auto, cpu, cuda and cuda:N (float64 is needed)")
    if kind == "cuda" and (not torch.cuda.is_available() or int(index or 0) >= torch.cuda.device_count()):
        raise InputError(
            f"--device {name} given, but torch sees {torch.cuda.device_count()} GPUs here; use --device cpu"
        )
    return torch.device(name)
