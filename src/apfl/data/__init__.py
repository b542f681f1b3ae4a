"""From files to federations: sources, backbones, partitions, and the protocol that splits rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from apfl.errors import names_in

if TYPE_CHECKING:
    from apfl.data.load import load_data, load_dataset, open_source
    from apfl.data.samples import Samples
    from apfl.data.source import Source

# Where each name lives; imported when first used, because a command's options need `Source` and no torch.
HOMES = {"load": "load_data load_dataset open_source", "samples": "Samples", "source": "Source"}

__all__ = ["Samples", "Source", "load_data", "load_dataset", "open_source"]


__getattr__ = names_in(__name__, HOMES)
