"""The server of a masked sum: passes messages on, adds masked vectors up, and removes the masks of the sum.

    aggregator = Aggregator(roster, round_)
    questions = aggregator.questions()            # by member's name
    aggregator.receive(name, answer)              # for as long as the caller likes to wait
    questions = aggregator.close()                # the next phase, five times; then
    aggregator.total, aggregator.survivors

A member that does not answer before its phase is closed is out; the others go on. Its state is in memory: a server that
is killed starts a new round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import numpy as np

from apfl.errors import InputError
from apfl.federate.secure.ciphers import SIGNATURE_BYTES, agree, digest, is_signed, new_key
from apfl.federate.secure.keys import (
    Advertisement,
    Pair,
    is_private_of,
    masked_with,
    seed_commitment,
    seed_key,
    survived,
)  # fmt: skip
from apfl.federate.secure.masks import Words, add_masks, add_packed, word
from apfl.federate.secure.member import KEY_SHARE, MINIMUM, PHASES, SEED_SHARE
from apfl.federate.secure.messages import SERVER, Message, bitmap, read, write
from apfl.federate.secure.roster import Roster, Round
from apfl.federate.secure.shamir import join

__all__ = ["Aggregator"]

ANSWERS = dict(zip(PHASES, ("advertisement", "shares", "masked", "confirmation", "unmasking"), strict=True))


class Aggregator:
    """One round at the server; ``phase`` is the one whose answers it takes, None after the last."""

    def __init__(self, roster: Roster, round_: Round, minimum: int = MINIMUM) -> None:
        if round_.roster != roster.fingerprint:
            raise InputError(f"a round for roster {round_.roster[:16]} given with roster {roster.fingerprint[:16]}")
        self.roster, self.round_, self.minimum = roster, round_, minimum
        self.phase: str | None = PHASES[0]
        self._total = np.zeros(round_.length, word(round_.bits))
        self._seen: dict[int, bytes] = {}  # in this phase: the hash of each answer
        self.advertised: dict[int, Advertisement] = {}
        self.shares: dict[int, Mapping[int, bytes]] = {}
        self.receipts: dict[int, bytes] = {}
        self.signatures: dict[int, bytes] = {}
        self.revealed: dict[int, Mapping[int, bytes]] = {}

    @property
    def total(self) -> Words:
        """The sum over the survivors, modulo 2^bits."""
        if self.phase is not None:
            raise InputError(f"the sum is still masked; this round is at '{self.phase}'")
        return self._total

    @property
    def survivors(self) -> tuple[str, ...]:
        """Whose vectors are in the sum."""
        return tuple(self.roster.names[number] for number in sorted(self.receipts))

    def questions(self) -> dict[str, bytes]:
        """The first question, for everyone."""
        return dict.fromkeys(self.roster.names, self.round_.to_bytes())

    def receive(self, name: str, answer: bytes) -> None:
        """Take a member's answer in this phase; the transport says who it is."""
        number = self.roster.number(name)
        if self.phase is None or number not in self._asked():
            raise InputError(f"'{name}' is not asked in this phase; it is too late for this round")
        if number in self._seen:
            if self._seen[number] != digest(answer):
                raise InputError(f"'{name}' answered '{self.phase}' twice, and not the same")
            return
        message = read(answer, ANSWERS[self.phase], self.round_, self.roster, number)
        take: dict[str, Callable[[int, Message], None]] = {
            "advertise": self._advertised, "share": self._shared, "mask": self._masked,
            "confirm": self._confirmed, "unmask": self._unmasked,
        }  # fmt: skip
        take[self.phase](number, message)
        self._seen[number] = digest(answer)

    def close(self) -> dict[str, bytes]:
        """End the phase; the questions of the next one by name. Too few are an error; more may still answer."""
        assert self.phase is not None, "the round is over"
        self._check_enough()
        following = {
            "advertise": self._keys_for, "share": self._delivery_for, "mask": self._survivors_for,
            "confirm": self._signatures_for,
        }  # fmt: skip
        if self.phase == "unmask":
            self._unmask()
            self.phase = None
            return {}
        messages = {number: following[self.phase](number) for number in sorted(self._seen)}
        self.phase = PHASES[PHASES.index(self.phase) + 1]
        self._seen = {}
        return {self.roster.names[number]: write(message, self.round_) for number, message in messages.items()}

    def _asked(self) -> Iterable[int]:
        """Who may answer in this phase: whoever answered in the last one."""
        before = (range(len(self.roster)), self.advertised, self.shares, self.receipts, self.signatures)
        return before[PHASES.index(str(self.phase))]

    def _check_enough(self) -> None:
        """Raise if too few are left for a sum, or too few signed the list of survivors."""
        left = self.receipts if self.phase in ("confirm", "unmask") else self._seen
        self.roster.check_survivors(left, self.minimum)
        if self.phase == "confirm" and len(self.signatures) < self.roster.threshold:
            raise InputError(
                f"{len(self.signatures)} of {len(self.roster)} members signed the list of survivors and "
                f"{self.roster.threshold} are needed; nothing is unmasked. Start a new round"
            )

    def _near(self, number: int, among: Iterable[int]) -> list[int]:
        return sorted(self.roster.neighbours(number) & set(among))

    # ------------------------------------------------------------------------------------------------- answers

    def _advertised(self, number: int, message: Message) -> None:
        advertisement = Advertisement.from_bytes(message.fixed)
        if not advertisement.is_of(self.roster.names[number], self.round_, self.roster):
            raise InputError(f"the keys of '{self.roster.names[number]}' are not signed by its identity")
        for public in (advertisement.encryption, advertisement.mask):
            agree(new_key(), public)  # with a key of low order nobody could, and all neighbours would fail
        self.advertised[number] = advertisement

    def _shared(self, number: int, message: Message) -> None:
        if list(message.records) != self._near(number, self.advertised):
            raise InputError(f"'{self.roster.names[number]}' sent shares for others than its neighbours")
        self.shares[number] = message.records

    def _masked(self, number: int, message: Message) -> None:
        name, receipt = self.roster.names[number], message.fixed[:SIGNATURE_BYTES]
        if not is_signed(self.roster.keys[name], receipt, masked_with(self.round_, name, self._list(self.shares))):
            raise InputError(f"'{name}' did not sign the list against which it masked")
        add_packed(self._total, message.fixed[SIGNATURE_BYTES:], self.round_.bits)
        self.receipts[number] = receipt

    def _confirmed(self, number: int, message: Message) -> None:
        name = self.roster.names[number]
        if not is_signed(self.roster.keys[name], message.fixed, survived(self.round_, self._list(self.receipts))):
            raise InputError(f"'{name}' did not sign the list of survivors")
        self.signatures[number] = message.fixed

    def _unmasked(self, number: int, message: Message) -> None:
        for owner, revealed in message.records.items():
            kind = SEED_SHARE if owner in self.receipts else KEY_SHARE
            if owner not in self.shares or revealed[:1] != kind:
                raise InputError(f"'{self.roster.names[number]}' revealed a share that nobody asked for")
        self.revealed[number] = message.records

    # ----------------------------------------------------------------------------------------------- questions

    def _list(self, members: Iterable[int]) -> bytes:
        return bitmap(set(members), self.roster)

    def _keys_for(self, number: int) -> Message:
        near = self._near(number, self.advertised)
        return Message("advertisements", SERVER, records={i: self.advertised[i].to_bytes() for i in near})

    def _delivery_for(self, number: int) -> Message:
        near = self._near(number, self.shares)
        return Message("delivery", SERVER, self._list(self.shares), {i: self.shares[i][number] for i in near})

    def _survivors_for(self, number: int) -> Message:
        near = self._near(number, self.receipts)
        return Message("survivors", SERVER, self._list(self.receipts), {i: self.receipts[i] for i in near})

    def _signatures_for(self, number: int) -> Message:
        return Message("confirmations", SERVER, records=self.signatures)

    # ---------------------------------------------------------------------------------------------- unmasking

    def _unmask(self) -> None:
        """Subtract the self-masks of survivors, and the masks that they share with members that dropped out."""
        add_masks(self._total, [*self._self_masks(), *self._masks_of_dropped()])
        self._total &= self._total.dtype.type(2**self.round_.bits - 1)

    def _self_masks(self) -> Iterator[tuple[bytes, bool]]:
        for number in self.receipts:
            yield seed_key(self.round_, self.roster.names[number], self._secret(number, self._is_seed)), False

    def _masks_of_dropped(self) -> Iterator[tuple[bytes, bool]]:
        for number in self.shares.keys() - self.receipts.keys():
            private = self._secret(number, self._is_mask_key)
            for other in self._near(number, self.receipts):
                pair = Pair(self.round_, self.roster.names[number], self.roster.names[other])
                # What the survivor subtracted is added, and the other way round.
                yield pair.mask_key(private, self.advertised[other].mask), pair.adds

    def _is_seed(self, owner: int, secret: bytes) -> bool:
        name, committed = self.roster.names[owner], self.advertised[owner].commitment
        return seed_commitment(self.round_, name, secret) == committed

    def _is_mask_key(self, owner: int, secret: bytes) -> bool:
        return is_private_of(secret, self.advertised[owner].mask)

    def _secret(self, owner: int, fits: Callable[[int, bytes], bool]) -> bytes:
        """A member's seed or mask key, from the shares that its holders revealed; one false share is left out."""
        needed, name = self.roster.holders_needed, self.roster.names[owner]
        shares = {i + 1: told[owner][1:] for i, told in sorted(self.revealed.items()) if owner in told}
        if len(shares) < needed:
            raise InputError(
                f"{len(shares)} members answered for '{name}' and {needed} are needed; the sum stays masked. "
                "Start a new round"
            )
        for left_out in (0, *list(shares)[:needed]):
            rest = {holder: share for holder, share in shares.items() if holder != left_out}
            secret = join(rest, needed) if len(rest) >= needed else None
            if secret is not None and fits(owner, secret):
                return secret
        raise InputError(
            f"the shares of '{name}' do not fit what it advertised: it or its holders lied; the sum stays masked"
        )
