"""The account of a federation: every release, charged before anyone can know it.

A release is one noisy sum. Its *key* says which sum it is: the members whose contributions are in it, or under masks
the roster. The same sum is released with the same noise, however often it is asked for, and charged once; a sum with
other members has fresh noise and a charge of its own. All releases are composed as if one row had been in each of them,
which holds for rows that change sites as well. No charge is ever taken back.

It is read without torch, for the status.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from apfl.errors import InputError
from apfl.federate.blobs import FolderError
from apfl.federate.wire import sha256
from apfl.maths.privacy import epsilon_of

if TYPE_CHECKING:
    from apfl.federate.ledger import Ledger
    from apfl.federate.terms import Terms

__all__ = [
    "Budget",
    "Release",
    "affords",
    "charge",
    "check_told",
    "find",
    "forget_departed",
    "key_of_members",
    "parse",
    "releases",
    "told",
    "write",
    "written",
]

KEY = "releases"  # of the ledger's meta data
SLACK = 1e-9  # relative: epsilon is found by a search, and added up in floating point


@dataclass(frozen=True)
class Budget:
    """What the terms allow over all releases."""

    epsilon: float
    delta: float
    releases: int

    @staticmethod
    def of(terms: Terms) -> Budget:
        epsilon = terms.method.epsilon
        assert epsilon != "none"
        return Budget(float(epsilon), terms.method.delta, terms.releases)

    def spent(self, multipliers: Sequence[float]) -> float:
        """The epsilon of these releases; refused if it passes the budget."""
        epsilon = epsilon_of(multipliers, self.delta) if multipliers else 0.0
        if len(multipliers) > self.releases or epsilon > self.epsilon * (1 + SLACK):
            raise InputError(
                f"release {len(multipliers)} would make epsilon {epsilon:.4g} with delta {self.delta:g}; the terms "
                f"allow {self.epsilon:g} over {self.releases} releases (a sum for each join, leave and late cohort). "
                "Sites that come later can still receive what is published. For more, start a new folder with more "
                "--releases, which have more noise each"
            )
        return epsilon


@dataclass(frozen=True)
class Release:
    """One noisy sum."""

    key: str
    multiplier: float  # that is accounted for
    sigma: float  # of the noise of an entry, as far as it is known
    epsilon: float  # of this and all releases before
    at: float
    members: tuple[str, ...] = ()  # hashes of the contributions in it; none under masks
    blob: str = ""  # the file with the sum; none under masks, and once a member has left
    sha256: str = ""

    def __post_init__(self) -> None:
        numbers = (self.multiplier, self.sigma, self.epsilon, self.at)
        if not all(isinstance(each, float) and 0 < each < math.inf for each in numbers):
            raise ValueError("no positive numbers")
        if not all(isinstance(each, str) for each in (self.key, self.blob, self.sha256, *self.members)) or not self.key:
            raise ValueError("no texts")


def parse(text: str) -> list[Release]:
    """Releases as they are written; refused if they are not."""
    try:
        found = json.loads(text)
        made = [Release(**{**each, "members": tuple(each["members"])}) for each in found]
        if len({each.key for each in made}) < len(made) or written(made) != text:
            raise ValueError("not as apfl writes it")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise FolderError(f"an account that cannot be read ({error}); restore it from a backup") from error
    return made


def written(made: Sequence[Release]) -> str:
    """Releases as text: the same for the same releases."""
    return json.dumps([asdict(each) for each in made], sort_keys=True, allow_nan=False)


def releases(ledger: Ledger) -> list[Release]:
    """All releases, in the order in which they were charged."""
    return parse(ledger.get(KEY) or "[]")


def find(ledger: Ledger, key: str) -> Release | None:
    """The release of this sum, if it was charged already."""
    return next((each for each in releases(ledger) if each.key == key), None)


def affords(made: Sequence[Release], budget: Budget, key: str, multiplier: float) -> bool:
    """Whether this sum may be released: it was before, or there is room for it."""
    if any(each.key == key for each in made):
        return True
    try:
        budget.spent([*(each.multiplier for each in made), multiplier])
    except InputError:
        return False
    return True


def charge(
    made: Sequence[Release], budget: Budget, key: str, multiplier: float, sigma: float, **more: Any
) -> list[Release]:
    """The releases with this one; the same if it was charged before, refused if it passes the budget."""
    if any(each.key == key for each in made):
        return list(made)
    epsilon = budget.spent([*(each.multiplier for each in made), multiplier])
    return [*made, Release(key, multiplier, sigma, epsilon, time.time(), **more)]


def write(ledger: Ledger, made: Sequence[Release]) -> None:
    """Keep the account; inside a transaction."""
    ledger.put(KEY, written(made))
    last = made[-1]
    ledger.event("charged", release=len(made), epsilon=last.epsilon)


def key_of_members(members: Collection[str]) -> str:
    """Of the sum over these contributions."""
    return sha256(json.dumps(sorted(members)).encode())


def forget_departed(ledger: Ledger) -> None:
    """Delete noisy sums with a contribution that was taken out; the charges stay."""
    made = releases(ledger)
    stale = [each for each in made if each.blob and any(map(ledger.departed, each.members))]
    if not stale:
        return
    kept = [replace(each, blob="", sha256="", members=()) if each in stale else each for each in made]
    with ledger.transaction():
        ledger.put(KEY, written(kept))
    ledger.blobs.remove([each.blob for each in stale])


def told(made: Sequence[Release], method: Mapping[str, Any], planned: int) -> dict[str, Any]:
    """The account as plain values: for a publication, the status and a model's file."""
    return {
        "epsilon": made[-1].epsilon if made else 0.0, "delta": method["delta"], "allowed": method["epsilon"],
        "releases": len(made), "planned": planned, "noise": method["noise"],
        "sigma": made[-1].sigma if made else None,
    }  # fmt: skip


def check_told(account: object, budget: Budget) -> dict[str, Any]:
    """The account that a publication came with; refused if it is none, or beyond what the terms allow."""
    if not isinstance(account, dict):
        raise InputError("a publication under noise without its account; get it again from the server")
    epsilon, number = account.get("epsilon"), account.get("releases")
    if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or type(number) is not int:
        raise InputError("a publication whose account has no epsilon or no releases; get it again from the server")
    within = 0 < epsilon <= budget.epsilon * (1 + SLACK) and 1 <= number <= budget.releases
    if not within or account.get("delta") != budget.delta:
        raise InputError(
            f"a publication with epsilon {epsilon:.4g} and delta {account.get('delta')} after {number} releases; the "
            f"terms allow {budget.epsilon:g} and {budget.delta:g} over {budget.releases}. This site does not use it"
        )
    return account
