"""The one exception a user is meant to read."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class InputError(ValueError):
    """Something given is not usable; the message says what was given, what is allowed and what to do.

    The command line prints the message as one line and exits with code 2.
    """


def unknown(what: str, name: str, known: Iterable[str]) -> InputError:
    """An error for a name that does not exist, with the nearest one that does.

    >>> print(unknown("method", "fedprx", ["afl", "fedprox"]))
    no method 'fedprx'; did you mean 'fedprox'? (have: afl, fedprox)
    >>> print(unknown("column", "site", []))
    no column 'site'. (have none)
    """
    known = sorted(known)
    near = get_close_matches(name, known, n=1)
    hint = f"; did you mean '{near[0]}'?" if near else "."
    return InputError(f"no {what} '{name}'{hint} (have{': ' + ', '.join(known) if known else ' none'})")


def not_finite(what: str) -> InputError:
    """An error for numbers that are NaN or infinite as given, or that overflow when they are used.

    >>> print(not_finite("the features"))
    the features contain NaN or infinity, or overflow; remove or repair such rows, or scale the features down
    """
    return InputError(
        f"{what} contain NaN or infinity, or overflow; remove or repair such rows, or scale the features down"
    )
