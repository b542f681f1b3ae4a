"""Masked sums: a server adds integer vectors modulo 2^b and sees none of them.

Double masking with dropout recovery (Bonawitz et al., CCS 2017), with neighbours instead of everyone for many members
(Bell et al., CCS 2020). It knows nothing of models, messages or transports: integer vectors and bytes in, bytes and
one integer vector out.

    roster, round  who may be in a sum, confirmed out of band; which sum it is
    member         a site: five questions, five answers; refuses what could tell more than the sum
    aggregator     the server: passes messages on, adds, unmasks the sum
    inprocess      all of them in one process

Every member masks its vector twice: with a mask of its own, from a seed, and with one for each neighbour, from a key
that the two agree on, which the one adds and the other subtracts. All neighbours hold shares of its seed and of its
mask key. At the end the server asks for the seeds of those whose vectors arrived and for the mask keys of those whose
vectors did not, and never gets both of one member.
"""

from __future__ import annotations

from apfl.federate.secure.aggregator import Aggregator
from apfl.federate.secure.ciphers import new_key, verifying_key
from apfl.federate.secure.inprocess import MaskedSum, enlist, masked_sum
from apfl.federate.secure.masks import bits_for_sum, signed
from apfl.federate.secure.member import PHASES, Member
from apfl.federate.secure.roster import Roster, Round

__all__ = [
    "PHASES", "Aggregator", "MaskedSum", "Member", "Roster", "Round", "bits_for_sum", "enlist", "masked_sum",
    "new_key", "signed", "verifying_key",
]  # fmt: skip
