"""The one exception a user is meant to read, and text from outside that users are shown; libraries that only some uses
need, names that are imported when used."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any


class InputError(ValueError):
    """Something given is not usable; the message says what was given, what is allowed and what to do.

    The command line prints the message as one line and exits with code 2.

    >>> import apfl
    >>> try:
    ...     apfl.load_method("apfl", gamma=-1)
    ... except InputError as error:
    ...     print("gamma" in str(error))
    True
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


# What pydantic expects, by the type of the problem it reports; other problems say it in their message.
_EXPECTED = {
    "bool_type": "true or false", "bool_parsing": "true or false", "int_type": "a whole number",
    "int_parsing": "a whole number", "int_from_float": "a whole number", "float_type": "a number",
    "float_parsing": "a number", "string_type": "a text", "list_type": "a list of such", "dict_type": "a table",
}  # fmt: skip
_BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")


def allowed_in_words(problems: Iterable[Mapping[str, Any]]) -> str:
    """What a value may be, from what pydantic reports about it: one problem for each type that it could have had.

    >>> allowed_in_words([{"type": "greater_than", "msg": "Input should be greater than 0"}, {"type": "int_type"}])
    'a number greater than 0 or a whole number'
    """
    return " or ".join(dict.fromkeys(map(_expected, problems)))


def _expected(problem: Mapping[str, Any]) -> str:
    if problem["type"] in _EXPECTED:
        return _EXPECTED[problem["type"]]
    words = str(problem["msg"]).removeprefix("Input should be ")
    return f"a number {words}" if problem["type"] in _BOUNDS else words


def not_finite(what: str) -> InputError:
    """An error for numbers that are NaN or infinite as given, or that overflow when they are used.

    >>> print(not_finite("the features"))
    the features contain NaN or infinity, or overflow; remove or repair such rows, or scale the features down
    """
    return InputError(
        f"{what} contain NaN or infinity, or overflow; remove or repair such rows, or scale the features down"
    )


def printable(text: object, longest: int = 500) -> str:
    """Text from outside as one line of bounded length that a terminal shows and does not obey.

    >>> print(printable("cannot read\\x1b[2J\\n this \\u202efile"))
    cannot read\\x1b[2J this \\u202efile
    >>> print(printable("x" * 1000, longest=5))
    xxxxx… (1000 characters)
    """
    whole = str(text)
    line = " ".join(whole[: 4 * longest].split())
    shown = "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in line)
    if len(shown) <= longest and len(whole) <= 4 * longest:
        return shown
    return f"{shown[:longest]}… ({len(whole)} characters)"


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
