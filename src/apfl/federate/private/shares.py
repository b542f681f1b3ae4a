"""A site's part of a masked sum under noise: its sums with its share of the noise, and the site's own account.

One roster is one release. The noisy vector is made once for it and kept: asked again, the site sends the same numbers,
whatever has become of its rows since. Nothing can be known before the site helps to unmask, so it charges itself then,
on disk, before it answers. It does not rely on the server's account.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
from torch import Tensor

from apfl.errors import InputError
from apfl.federate.blobs import FolderError
from apfl.federate.private import account
from apfl.federate.private.account import Budget, Release
from apfl.federate.private.agreement import encoding_of, multiplier_of, share_of
from apfl.federate.private.entropy import Entropy
from apfl.federate.secure.roster import Roster
from apfl.federate.terms import Terms
from apfl.maths.bits import Layout, Part

__all__ = ["OwnAccount", "noisy_layout", "noisy_vector"]

TAIL = 20.0  # standard deviations of noise that the range has room for: beyond lie 1e-88 of all draws
FILE = "account.json"


def noisy_layout(terms: Terms, roster: Roster) -> Layout:
    """Of a member's vector: the range of its sums, and room for its share of the noise."""
    encoding = encoding_of(terms)
    sizes = encoding.sizes(share_of(terms, roster.threshold))

    def bits(part: Part) -> int:
        return (part.high + math.ceil(TAIL * sizes[part.name])).bit_length() + 1

    return Layout(tuple(Part(part.name, part.size, bits(part)) for part in encoding.layout.parts))


def noisy_vector(
    path: Path, terms: Terms, roster: Roster, own: Callable[[], Tensor]
) -> tuple[np.ndarray, bytes | None]:
    """The vector that this site adds for a roster; ``own`` makes its sums. With it the bytes to keep, if it is new."""
    layout = noisy_layout(terms, roster)
    if path.is_file():
        return layout.unpack(np.frombuffer(path.read_bytes(), np.uint8)), None
    noise = encoding_of(terms).noise(share_of(terms, roster.threshold), Entropy())
    limits = np.concatenate([np.full(part.size, part.high, np.int64) for part in layout.parts])
    vector = np.clip((own().cpu() + noise).numpy(), -limits, limits)
    return vector, layout.pack(vector).tobytes()


class OwnAccount:
    """What this site has helped to release in one federation, in a file of its own."""

    def __init__(self, home: Path, terms: Terms, write: Callable[[str, bytes], None]) -> None:
        self.path, self.terms, self._write = home / FILE, terms, write

    def releases(self) -> list[Release]:
        """All of them, in order."""
        try:
            return account.parse(self.path.read_text()) if self.path.exists() else []
        except (OSError, UnicodeError, FolderError) as error:
            raise InputError(f"{self.path} cannot be read ({error}); restore it, or this site sends nothing") from error

    def charged(self, roster: Roster) -> list[Release]:
        """The releases with that of this roster; refused if it would pass what the terms allow."""
        multiplier = multiplier_of(self.terms, roster.threshold)
        least = share_of(self.terms, roster.threshold) * math.sqrt(roster.threshold)
        return account.charge(self.releases(), Budget.of(self.terms), roster.fingerprint, multiplier, least)

    def charge(self, roster: Roster) -> None:
        """Write the charge of this roster down; once."""
        made = self.charged(roster)
        if len(made) > len(self.releases()):
            self._write(FILE, account.written(made).encode())
