"""Names of federations and of their clients."""

from __future__ import annotations

import re

from apfl.errors import InputError

__all__ = ["check_name"]


def check_name(what: str, name: str) -> str:
    """A name that can stand in a path and on one line of a terminal."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise InputError(
            f"{what} name {name[:80]!r} given; allowed are up to 64 letters, digits, '.', '_' and '-', "
            "beginning with a letter or digit"
        )
    return name
