"""How much noise (epsilon, delta)-differential privacy asks for, by `dp-accounting`.

Everything here is about Gaussian noise on a vector that one row changes by at most 1 in length: its standard deviation
is the *noise multiplier*. The discrete Gaussian satisfies the same concentrated differential privacy as the continuous
one (Canonne, Kamath and Steinke, 2020, Theorem 14), so Renyi differential privacy accounts for it. A bound for the
continuous one alone would ask for 6 to 8 % less noise, and is not proven for integers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from apfl.errors import InputError, optional

__all__ = ["epsilon_of", "epsilon_spent", "most_advantage", "noise_multiplier"]

LEAST, MOST = 1e-2, 1e4  # noise multipliers between which the right one is looked for
ORDERS = tuple(1 + 10 ** (step / 50) for step in range(-50, 200))  # of Renyi's divergence: 1.1 to 9,000


@lru_cache(maxsize=64)
def noise_multiplier(epsilon: float, delta: float, releases: int = 1) -> float:
    """The least standard deviation for so many releases, each with fresh noise."""
    dp, rdp = _accounting()
    try:
        found = dp.calibrate_dp_mechanism(
            lambda: rdp.RdpAccountant(ORDERS), lambda z: _event(dp, z, releases), epsilon, delta,
            bracket_interval=dp.ExplicitBracketInterval(LEAST, MOST),
        )  # fmt: skip
    except ValueError as error:  # no bracket holds the answer
        raise InputError(
            f"epsilon={epsilon:g} with delta={delta:g} given: no noise between {LEAST:g} and {MOST:g} times the "
            "largest change gives that; epsilon between 0.01 and 100 with delta from 1e-12 to 0.1 is usual"
        ) from error
    return float(found)


def epsilon_spent(multiplier: float, delta: float, releases: int = 1) -> float:
    """The epsilon that so many releases with this noise amount to."""
    return epsilon_of([multiplier] * releases, delta)


def epsilon_of(multipliers: Sequence[float], delta: float) -> float:
    """The epsilon of these releases, each with fresh noise of its own size, for rows that are in all of them.

    A release may be chosen with the results of those before it in view: Renyi's bounds add up all the same.
    """
    dp, rdp = _accounting()
    accountant = rdp.RdpAccountant(ORDERS)
    for multiplier in multipliers:
        accountant.compose(dp.GaussianDpEvent(multiplier))
    return float(accountant.get_epsilon(delta))


def most_advantage(epsilon: float, delta: float) -> float:
    """What a membership attack's true positive rate can exceed its false positive rate by, whatever the attacker knows.

    Kairouz, Oh and Viswanath (2015): the largest difference of the two rates that (epsilon, delta) allows.

    >>> round(most_advantage(1.0, 0.0), 3), most_advantage(0.0, 0.0)
    (0.462, 0.0)
    """
    grown = math.exp(epsilon)
    return (grown - 1 + 2 * delta) / (grown + 1)


def _event(dp: Any, multiplier: float, releases: int) -> Any:
    return dp.SelfComposedDpEvent(dp.GaussianDpEvent(multiplier), releases)


def _accounting() -> tuple[Any, Any]:
    return optional("dp_accounting", "privacy"), optional("dp_accounting.rdp", "privacy")
