"""Which device a name means: the one rule of every ``--device``."""

from __future__ import annotations

import logging

import torch

from apfl.errors import InputError

__all__ = ["device_of", "float64_device"]

log = logging.getLogger(__name__)


def device_of(name: str) -> torch.device:
    """The device for a backbone; ``auto`` is a GPU, NVIDIA's or Apple's, if there is one."""
    have = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    if name == "auto":
        name = next(kind for kind in ("cuda", "mps", "cpu") if have[kind])
    kind, _, index = name.partition(":")
    if kind not in have or not (index == "" or index.isdigit()):
        raise InputError(f"--device {name} given; allowed are auto, cpu, cuda, cuda:N and mps")
    if int(index or 0) >= have[kind]:
        raise InputError(f"--device {name} given, but torch sees {have[kind]} of that kind here; use --device cpu")
    return torch.device(name)


def float64_device(name: str) -> torch.device:
    """The device for methods: that of `device_of`, but the CPU in place of mps, which has no float64."""
    device = device_of(name)
    if device.type != "mps":
        return device
    if name != "auto":
        log.info("--device %s is for the backbone; methods need float64, which mps lacks, and run on the CPU", name)
    return torch.device("cpu")
