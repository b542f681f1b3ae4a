"""A server, and members that collude with it: all that passes through the server, and all that those members know.

It is honest work: it opens every share that it can, joins every secret of which it has enough shares, computes every
mask whose key it can make, and subtracts them all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping

import numpy as np

from apfl.errors import InputError
from apfl.federate.secure import Member, Roster, Round
from apfl.federate.secure.ciphers import SIGNATURE_BYTES, decrypt, sign
from apfl.federate.secure.keys import Advertisement, Pair, is_private_of, seed_commitment, seed_key, survived
from apfl.federate.secure.masks import add_masks, add_packed, word
from apfl.federate.secure.member import KEY_SHARE, SEED_SHARE
from apfl.federate.secure.messages import SERVER, Message, bitmap, read, write
from apfl.federate.secure.shamir import SHARE_BYTES, join


class Attacker:
    def __init__(self, round_: Round, roster: Roster, colluding: Collection[Member]) -> None:
        self.round_, self.roster = round_, roster
        self.colluding = {member.number: member for member in colluding}
        self.advertised: dict[int, Advertisement] = {}
        self.sealed: dict[int, Mapping[int, bytes]] = {}  # by sender, by holder
        self.partners: dict[int, frozenset[int]] = {}  # against whom a member masked, as it was told
        self.masked: dict[int, bytes] = {}
        self.receipts: dict[int, bytes] = {}
        self.shares: dict[tuple[bytes, int], dict[int, bytes]] = defaultdict(dict)  # kind, owner -> holder -> share

    # ------------------------------------------------------------------------------------------ what it overhears

    def take(self, member: Member, answer: bytes) -> None:
        """Whatever a member sends passes through the server."""
        number = member.number
        for kind in ("advertisement", "shares", "masked", "confirmation", "unmasking"):
            try:
                message = read(answer, kind, self.round_, self.roster, number)
            except InputError:
                continue
            if kind == "advertisement":
                self.advertised[number] = Advertisement.from_bytes(message.fixed)
            elif kind == "shares":
                self.sealed[number] = message.records
            elif kind == "masked":
                self.receipts[number] = message.fixed[:SIGNATURE_BYTES]
                self.masked[number] = message.fixed[SIGNATURE_BYTES:]
            elif kind == "unmasking":
                for owner, revealed in message.records.items():
                    self.shares[revealed[:1], owner][number] = revealed[1:]

    def open_shares(self) -> None:
        """What colluding members hold of everyone's secrets."""
        for number, member in self.colluding.items():
            self._hold(number, number, member.progress.own)
            for sender, sealed in self.sealed.items():
                if number in sealed and sender != number:
                    pair = Pair(self.round_, member.name, self.roster.names[sender])
                    key = pair.receiving_key(member.progress.encryption, self.advertised[sender].encryption)
                    self._hold(sender, number, decrypt(key, sealed[number], self.round_.id))

    def _hold(self, owner: int, holder: int, both: bytes | None) -> None:
        if both:
            self.shares[KEY_SHARE, owner][holder] = both[:SHARE_BYTES]
            self.shares[SEED_SHARE, owner][holder] = both[SHARE_BYTES:]

    # ----------------------------------------------------------------------------------------- what it makes of it

    def seed(self, owner: int) -> bytes | None:
        if owner in self.colluding:
            return self.colluding[owner].progress.seed
        found = self._joined(SEED_SHARE, owner)
        name = self.roster.names[owner]
        fits = found and seed_commitment(self.round_, name, found) == self.advertised[owner].commitment
        return found if fits else None

    def mask_key(self, owner: int) -> bytes | None:
        if owner in self.colluding:
            return self.colluding[owner].progress.mask
        found = self._joined(KEY_SHARE, owner)
        return found if found and is_private_of(found, self.advertised[owner].mask) else None

    def _joined(self, kind: bytes, owner: int) -> bytes | None:
        held = {holder + 1: share for holder, share in self.shares[kind, owner].items()}
        try:
            return join(held, self.roster.holders_needed)
        except InputError:
            return None

    def pair_key(self, one: int, other: int) -> tuple[bytes, bool] | None:
        """The mask between two members, as the first adds it, if one of their mask keys is known."""
        names = self.roster.names
        for mine, theirs in ((one, other), (other, one)):
            private = self.mask_key(mine)
            if private:
                pair = Pair(self.round_, names[mine], names[theirs])
                return pair.mask_key(private, self.advertised[theirs].mask), Pair(
                    self.round_, names[one], names[other]
                ).adds
        return None

    def guess(self, victim: int) -> list[int]:
        """A member's masked vector without all masks that can be known."""
        self.open_shares()
        vector = np.zeros(self.round_.length, word(self.round_.bits))
        add_packed(vector, self.masked[victim], self.round_.bits)
        seed = self.seed(victim)
        known = [] if seed is None else [(seed_key(self.round_, self.roster.names[victim], seed), True)]
        near = self.partners[victim] & self.roster.neighbours(victim)
        known += [mask for other in near if (mask := self.pair_key(victim, other))]
        add_masks(vector, [(key, not plus) for key, plus in known])
        return [int(value) % 2**self.round_.bits for value in vector]

    # ------------------------------------------------------------------------------------------------ what it asks

    def delivery(self, member: Member, partners: Collection[int]) -> bytes:
        """Shares from these members, as a question to one of them."""
        self.partners[member.number] = frozenset(partners)
        near = self.roster.neighbours(member.number) & set(partners)
        records = {i: self.sealed[i][member.number] for i in near}
        return write(Message("delivery", SERVER, bitmap(partners, self.roster), records), self.round_)

    def survivors(self, member: Member, listed: Collection[int]) -> bytes:
        near = self.roster.neighbours(member.number) & set(listed)
        records = {i: self.receipts[i] for i in near}
        return write(Message("survivors", SERVER, bitmap(listed, self.roster), records), self.round_)

    def signatures(self, listed: Collection[int], signed: Mapping[int, bytes]) -> bytes:
        """The honest members' signatures of a list, and those that colluding members make."""
        statement = survived(self.round_, bitmap(listed, self.roster))
        made = {i: sign(member.identity, statement) for i, member in self.colluding.items() if i in listed}
        return write(Message("confirmations", SERVER, records=made | dict(signed)), self.round_)
