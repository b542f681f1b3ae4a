"""The primary of a noisy sum: drawn once for each set of members, charged, kept, and published from the file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from apfl.federate.blobs import FolderError
from apfl.federate.ledger import Ledger
from apfl.federate.pool import Pool
from apfl.federate.private import account
from apfl.federate.private.account import Budget, Release
from apfl.federate.private.agreement import encoding_of, multiplier_of, share_of, sigma_of
from apfl.federate.private.entropy import Entropy
from apfl.federate.secure.roster import Roster
from apfl.federate.sums import IntegerSum
from apfl.federate.terms import Terms
from apfl.maths.noise import gamma_for, shrunk
from apfl.maths.personalise import Primary, solve_primary
from apfl.maths.ridge import Statistics

__all__ = ["NoisySum", "charge_roster", "check_room", "noisy_primary", "noisy_sum", "room_for"]


@dataclass(frozen=True, eq=False)
class NoisySum:
    """What is known of everyone's rows, and the size of the noise in it."""

    stats: Statistics
    sigma: float
    account: Mapping[str, Any]


def room_for(ledger: Ledger, terms: Terms, members: Mapping[str, str]) -> bool:
    """Whether the sum over these members may be published: its release is charged, or can be."""
    made = account.releases(ledger)
    if terms.masked:  # what a cohort's sum tells was charged when it was opened
        return all(any(each.key == roster for each in made) for roster in ledger.cohort_sums())
    key = account.key_of_members(list(members.values()))
    return account.affords(made, Budget.of(terms), key, multiplier_of(terms))


def check_room(ledger: Ledger, terms: Terms) -> None:
    """Refuse what could only be published by one release more than the terms allow."""
    Budget.of(terms).spent([*(each.multiplier for each in account.releases(ledger)), multiplier_of(terms)])


def charge_roster(ledger: Ledger, terms: Terms, roster: Roster, n_shares: int, *, write: bool) -> None:
    """Under masks: charge the sum over a roster, with the noise of so many shares, or see that it could be charged."""
    sigma = share_of(terms, roster.threshold) * math.sqrt(n_shares)
    multiplier = multiplier_of(terms, roster.threshold)
    made = account.charge(account.releases(ledger), Budget.of(terms), roster.fingerprint, multiplier, sigma)
    if not write:
        return
    # Asked again after a kill, other members may have answered in time, unless the sum was opened already.
    made = [replace(each, sigma=sigma) if each.key == roster.fingerprint else each for each in made]
    with ledger.transaction():
        account.write(ledger, made)


def noisy_sum(ledger: Ledger, pool: Pool, terms: Terms) -> NoisySum:
    """The sum over the members with its noise: that which was released before, or a new release."""
    running = pool.running()
    assert isinstance(running, IntegerSum)
    if terms.masked:
        vector, sigma = running.vector, _of_cohorts(ledger)
    else:
        release = _released(ledger, terms, running, pool.members())
        vector, sigma = ledger.blobs.tensors(release.blob, release.sha256)["integers"].numpy(), release.sigma
    stats = encoding_of(terms).decode(torch.from_numpy(vector))
    told = account.told(account.releases(ledger), vars(terms.method), terms.releases)
    return NoisySum(stats, sigma, told | {"sigma": sigma})


def _of_cohorts(ledger: Ledger) -> float:
    """The noise of a sum of several cohorts, each with its own."""
    made = {each.key: each.sigma for each in account.releases(ledger)}
    return math.sqrt(sum(made[roster] ** 2 for roster in ledger.cohort_sums()))


def _released(ledger: Ledger, terms: Terms, running: IntegerSum, members: Mapping[str, str]) -> Release:
    """The release of the sum over these members.

    The file is there before the charge, and the charge before anything is published: a server that is killed in
    between finds both, or neither, and whatever it had drawn then was seen by nobody.
    """
    hashes = sorted(members.values())
    key = account.key_of_members(hashes)
    known = account.find(ledger, key)
    if known is not None:
        if not known.blob:
            raise FolderError(f"{ledger.folder} is damaged: a noisy sum whose members left is asked for again")
        return known
    sigma, made = sigma_of(terms), account.releases(ledger)
    name = f"release-{len(made) + 1}.safetensors"
    noisy = running.vector + encoding_of(terms).noise(sigma, Entropy()).numpy()
    more = {"members": tuple(hashes), "blob": name}
    charged = account.charge(made, Budget.of(terms), key, multiplier_of(terms), sigma, **more)
    digest = ledger.blobs.put(name, {"integers": torch.from_numpy(np.ascontiguousarray(noisy))})
    charged[-1] = replace(charged[-1], sha256=digest)
    with ledger.transaction():
        account.write(ledger, charged)
    return charged[-1]


def noisy_primary(noisy: NoisySum, terms: Terms) -> Primary:
    """The primary with the ridge that its noise asks for."""
    gamma, width = terms.method.gamma, noisy.stats.width
    return solve_primary(shrunk(noisy.stats, noisy.sigma), gamma_for(noisy.sigma, width) if gamma == "auto" else gamma)
