"""From samples to features: frozen networks, one file for each, with ``load(*, pooling=None) -> Backbone``.

``efficientnet_lite0.py`` is named efficientnet-lite0; `huggingface` loads everything on the Hub. One from outside is
found by its entry point of the group ``apfl.backbones``, or by its path, ``./mine.py:load``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from apfl.data.registry import Registry, file_of, is_path
from apfl.errors import InputError

__all__ = ["BACKBONES", "Backbone", "backbone_names", "load_backbone", "weights_sha256"]

BACKBONES = Registry("backbone", "apfl.data.backbones", "apfl.backbones", attrgetter("load"))


def never(_: Any) -> bool:
    """Of no sample."""
    return False


@dataclass(frozen=True, eq=False)
class Backbone:
    """A frozen network with everything that decides what comes out of it."""

    name: str
    takes: str  # "images", "texts" or "vectors"
    weights: str  # SHA-256 of all parameters and buffers
    preprocessing: Mapping[str, Any]  # what ``prepare`` does, as data
    pooling: str
    module: nn.Module  # to be moved to a device; in eval mode
    prepare: Callable[[Any], Any]  # one sample -> the network's input; called on many threads and in other processes
    forward: Callable[[Tensor], Tensor]  # (b, ...) on the module's device -> (b, l)
    revision: str | None = None  # commit on the Hub
    combine: Callable[[list[Any]], Tensor] = torch.stack  # what ``prepare`` gave for b samples -> (b, ...)
    is_cut: Callable[[Any], bool] = never  # whether what ``prepare`` gave lacks the end of its sample


def backbone_names() -> list[str]:
    """The names there are; any other is looked for on the Hub."""
    from apfl.data.backbones import huggingface

    return sorted([*_files(), *huggingface.PRESETS])


def load_backbone(name: str, *, pooling: str | None = None, revision: str | None = None) -> Backbone:
    """A name, ``owner/name`` on the Hub, a folder with a model, or a path ``./mine.py:load``.

    >>> load_backbone("identity").forward(torch.ones(1, 3)).shape
    torch.Size([1, 3])
    """
    from apfl.data.backbones import huggingface

    if pooling not in (None, "cls", "mean"):
        raise InputError(f"--pooling {pooling} given; allowed are cls and mean")
    files = _files()
    if not is_path(name) and name not in files:
        return huggingface.load(name, pooling=pooling, revision=revision)
    if revision is not None:
        raise InputError(f"a backbone revision was given, but '{name}' is not from the Hub: leave it out")
    load = BACKBONES.load(files.get(name, name))
    backbone: Backbone = load(pooling=pooling)
    if own := file_of(load):  # another text may prepare or forward otherwise, with the same weights
        return replace(backbone, preprocessing={**backbone.preprocessing, "file_sha256": own["sha256"]})
    return backbone


def _files() -> dict[str, str]:
    """Names, and what the registry calls them: a file has underscores for dashes."""
    from apfl.data.backbones import huggingface

    builtin = {name.replace("_", "-"): name for name in BACKBONES.builtin() if name != "huggingface"}
    outside = {name: name for name in BACKBONES.names() if name not in BACKBONES.builtin()}
    for name in outside:
        if name in builtin or name in huggingface.PRESETS:
            raise InputError(f"a distribution has a backbone '{name}', as apfl itself; uninstall or rename it")
    return outside | builtin


def weights_sha256(module: nn.Module, without: Collection[str] = ()) -> str:
    """One hash over names, types, shapes and values: a fine-tuned copy under the same name is another backbone."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        if name in without:
            continue
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()
