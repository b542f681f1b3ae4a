"""Who masks with whom: everyone with everyone, or with neighbours on a ring if the roster is large.

Bell, Bonawitz, Gascon, Lepoint and Raykova (CCS 2020): with k neighbours each, on a ring in random order, the work of a
member no longer grows with the roster. The members stand in the order of a hash that only the roster decides. Each has
the k / 2 members before it and the k / 2 after it as neighbours: they share its masks and hold its shares.

The server and fewer than a third of the roster may collude, and the server decides who counts as dropped after it
has seen the ring. Two things must hold, whatever it decides:

* among the k + 1 holders of a member's shares, fewer than the threshold floor(2 (k + 1) / 3) + 1 collude;
* each stretch of k / 2 members has an honest survivor. Then the masks that stay secret connect all honest survivors,
  and the server learns their sum and no other. Members see to it: they refuse a list of survivors in which more than a
  quarter of some stretch is missing (`LOST`), so the rest of it would have to collude.

The ring is random and independent of who colludes, so the number that collude in a stretch is hypergeometric.
`failure` adds up the exact tails over all stretches of both kinds; `degree` is the smallest k for which this is at most
2^-80: 2^-40 for those who can try 2^40 rosters (whoever registers last can try keys). These bounds are ours, and more
careful than the paper's, in which dropouts are random; therefore k is larger:

    members   up to 200   250   300   500   1000   2000   5000   10000
    k         all others  182   196   236    276    302    324     332
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from math import comb

__all__ = ["EVERYONE", "FAILURE", "LOST", "at_least", "degree", "failure", "threshold"]

FAILURE = Fraction(1, 2**80)
LOST = Fraction(1, 4)  # of a stretch of neighbours
EVERYONE = 200  # members up to which all are neighbours: fewer would save little, and stand fewer dropouts


def threshold(members: int) -> int:
    """More than two thirds: t = floor(2 K / 3) + 1.

    >>> [threshold(members) for members in (3, 4, 5, 6, 7, 100)]
    [3, 3, 4, 5, 5, 67]
    """
    return 2 * members // 3 + 1


def at_least(stretch: int) -> int:
    """How many of a stretch must have survived."""
    return stretch - int(stretch * LOST)


@lru_cache(maxsize=64)
def degree(members: int) -> int:
    """The number of neighbours of each member."""
    if members <= EVERYONE:
        return members - 1
    return next(2 * half for half in range(1, members // 2) if failure(members, 2 * half) <= FAILURE)


def failure(members: int, neighbours: int) -> Fraction:
    """An upper bound of the probability that colluding members can separate an honest one."""
    colluding, half = (members - 1) // 3, neighbours // 2
    enough_holders = _tail(members - 1, colluding, neighbours, threshold(neighbours + 1))
    whole_stretch = _tail(members, colluding, half, at_least(half))
    return members * (enough_holders + whole_stretch)


def _tail(population: int, marked: int, drawn: int, least: int) -> Fraction:
    """The probability of ``least`` or more marked ones among those drawn without replacement."""
    ways = sum(comb(marked, i) * comb(population - marked, drawn - i) for i in range(least, min(drawn, marked) + 1))
    return Fraction(ways, comb(population, drawn))
