"""From files to federations: sources, backbones, partitions, and the protocol that splits rows."""

from __future__ import annotations

from apfl.data.load import Source, load_data, load_dataset, open_source
from apfl.data.samples import Samples

__all__ = ["Samples", "Source", "load_data", "load_dataset", "open_source"]
