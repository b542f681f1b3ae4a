"""The one exception a user is meant to read; libraries that only some uses need, names that are imported when used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any


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


def optional(module: str, extra: str) -> Any:
    """The module, or an error that says what to install.

    >>> optional("json", "hub").dumps([1])
    '[1]'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise InputError(f"{package} cannot be imported ({error}); install it: pip install 'apfl[{extra}]'") from error


def names_in(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's ``__getattr__``: a name is imported from its home (module: names) when it is first used.

    >>> names_in("json", {"decoder": "JSONDecoder"})("JSONDecoder").__name__
    'JSONDecoder'
    """

    def attribute(name: str) -> Any:
        for home, names in homes.items():
            if name in names.split():
                return getattr(importlib.import_module(f"{package}.{home}"), name)
        raise AttributeError(f"module '{package}' has no attribute '{name}'")

    return attribute
