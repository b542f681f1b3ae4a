"""Which seeds: a number of them or a list, in Python, on the command line and in a plan alike."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from apfl.errors import InputError

__all__ = ["LARGEST_SEED", "SEED", "SEEDS", "Seed", "Seeds", "listed", "seeds_of"]

LARGEST_SEED = 2**63 - 1  # the maps of the two streams are drawn from 2 seed and 2 seed + 1, of 64 bits
MOST = 100  # a larger number is more likely to be one seed than so many runs
SEED = f"a whole number from 0 to {LARGEST_SEED}"
SEEDS = (
    f"a list of whole numbers from 0 to {LARGEST_SEED} that differ from each other, for example [0, 1, 2], "
    f"or how many, from 1 to {MOST}"
)


def listed(seeds: Any) -> Any:
    """A number of seeds as a list; anything else as it is. 0 alone is the seed 0.

    >>> listed(3), listed([3]), listed(0)
    ([0, 1, 2], [3], [0])
    """
    counts = isinstance(seeds, int) and not isinstance(seeds, bool) and 0 <= seeds <= MOST
    return list(range(seeds or 1)) if counts else seeds


Seed = Annotated[int, Field(ge=0, le=LARGEST_SEED)]
Seeds = Annotated[list[Seed], BeforeValidator(listed), Field(min_length=1, description=SEEDS)]


def seeds_of(given: int | Sequence[int] | str) -> list[int]:
    """The seeds of ``seeds=`` or, as text, of --seeds: ``3`` is three seeds, ``0,1,2`` a list, ``7,`` a list of one.

    >>> seeds_of("3"), seeds_of("5,7"), seeds_of("7,"), seeds_of(3)
    ([0, 1, 2], [5, 7], [7], [0, 1, 2])
    """
    seeds = listed(_parsed(given) if isinstance(given, str) else given)
    if isinstance(seeds, int):
        raise InputError(
            f"{_said(given)} given; how many seeds is a number from 1 to {MOST}. One seed, from 0 to {LARGEST_SEED}, "
            f"is a list: {f'--seeds {seeds},' if isinstance(given, str) else f'seeds=[{seeds}]'}"
        )
    known = _whole(given, seeds)
    if not known or not 0 <= min(known) <= max(known) <= LARGEST_SEED or len(set(known)) < len(known):
        raise InputError(f"{_said(given)} given; they must be from 0 to {LARGEST_SEED} and differ from each other")
    return known


def _whole(given: object, seeds: Iterable[Any]) -> list[int]:
    try:
        return [index(seed) for seed in seeds]
    except TypeError:
        raise InputError(f"{_said(given)} given; allowed: {SEEDS}") from None


def _parsed(text: str) -> int | list[int]:
    try:
        if "," not in text:
            return int(text)
        return [int(part) for part in text.removesuffix(",").split(",")]
    except ValueError:
        raise InputError(
            f"--seeds {text!r} given; expected how many, for example 3, or whole numbers with commas, for example 0,1,2"
        ) from None


def _said(given: object) -> str:
    return f"--seeds {given!r}" if isinstance(given, str) else f"seeds={given!r}"
