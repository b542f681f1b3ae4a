"""A member of a masked sum: one site, which never trusts the server with more than the sum of at least a few.

Each phase is one question from the server and one answer. A member answers a phase once: the same question again gets
the same answer, another one is refused. It writes its state (``keep``) before it answers, so that a killed process goes
on where it stopped; with an older state than its last it could be asked twice, so only the newest may be restored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from apfl.errors import InputError, printable
from apfl.federate.secure.ciphers import (
    decrypt,
    digest,
    encrypt,
    is_signed,
    new_key,
    public_of,
    sign,
    verifying_key,
)
from apfl.federate.secure.keys import Advertisement, Pair, masked_with, seed_commitment, seed_key, survived
from apfl.federate.secure.masks import Words, add_masks, pack, words
from apfl.federate.secure.messages import Message, members_of, read, write
from apfl.federate.secure.progress import Progress
from apfl.federate.secure.roster import Roster, Round
from apfl.federate.secure.shamir import SHARE_BYTES, split

__all__ = ["KEY_SHARE", "MINIMUM", "PHASES", "SEED_SHARE", "Member"]

PHASES = ("advertise", "share", "mask", "confirm", "unmask")
MINIMUM = 3  # survivors below which a member unmasks nothing
KEY_SHARE, SEED_SHARE = b"k", b"s"


class Member:
    """A site's side of masked sums, one round after another.

    ``identity`` is its Ed25519 private key, ``roster`` the one it confirmed, ``minimum`` its own minimum cohort.
    ``state`` is what ``keep`` received last, with secrets in it.
    """

    def __init__(
        self, name: str, identity: bytes, roster: Roster, *, federation: str, minimum: int = MINIMUM,
        keep: Callable[[bytes], None] | None = None, state: bytes | None = None,
    ) -> None:  # fmt: skip
        if minimum < 2:
            raise InputError(f"a minimum cohort of {minimum} given; a sum of fewer than 2 is a single upload")
        self.name, self.identity, self.roster = name, identity, roster
        self.federation, self.minimum = federation, minimum
        self.number = roster.number(name)
        if roster.keys[name] != verifying_key(identity):
            raise InputError(f"the roster has another key for '{name}' than this one; ask for a corrected roster")
        self._keep, self._unsaved = keep, False
        self.progress = Progress() if state is None else Progress.from_bytes(state, roster)

    @property
    def state(self) -> bytes:
        """Everything that a killed process needs to go on; keep it private."""
        return self.progress.to_bytes()

    def advertise(self, question: bytes) -> bytes:
        """Answer to a new round: fresh public keys, signed."""
        round_ = Round.from_bytes(question)
        if self.progress.round_ != round_:
            self._begin(round_)
        return self._once("advertise", question, lambda: self._advertisement(round_))

    def share(self, question: bytes) -> bytes:
        """Answer to the neighbours' keys: shares of both secrets, encrypted for each neighbour."""
        return self._once("share", question, lambda: self._shares(self._read(question, "advertisements")))

    def mask(self, question: bytes, vector: NDArray[Any]) -> bytes:
        """Answer to the neighbours' shares: the masked vector. Another vector in the same round is refused."""
        numbers = words(vector, self._round.bits)
        told = digest(numbers.tobytes())
        self._once("mask", question, lambda: self._delivered(self._read(question, "delivery"), len(numbers), told))
        if told != self.progress.vector:
            raise InputError("another vector given in the same round; the difference of both would be told")
        return self._masked(numbers)

    def confirm(self, question: bytes) -> bytes:
        """Answer to the list of survivors: a signature, if this member would unmask their sum."""
        return self._once("confirm", question, lambda: self._confirmation(self._read(question, "survivors")))

    def unmask(self, question: bytes) -> bytes:
        """Answer to signatures on that list: for each neighbour one share, of one of its secrets."""
        return self._once("unmask", question, lambda: self._unmasking(self._read(question, "confirmations")))

    # ------------------------------------------------------------------------------------------ one answer a phase

    def _begin(self, round_: Round) -> None:
        if round_.federation != self.federation or round_.roster != self.roster.fingerprint:
            raise InputError(
                f"a round of '{printable(round_.federation)}' with roster {printable(round_.roster[:16])} given; "
                f"this site confirmed '{self.federation}' with roster {self.roster.fingerprint[:16]}"
            )
        if round_.number <= self.progress.last:
            raise InputError(f"round {round_.number} given after round {self.progress.last}; rounds never repeat")
        self.progress = Progress(last=round_.number, round_=round_)

    def _once(self, phase: str, question: bytes, answer: Callable[[], bytes]) -> bytes:
        """The answer of a phase; a repeated question gets the one given before."""
        done, asked = self.progress.done, digest(question)
        if phase not in done:
            if len(done) != PHASES.index(phase):
                raise InputError(f"'{phase}' was asked out of turn; this site waits for '{PHASES[len(done) % 5]}'")
            done[phase] = (asked, answer())
            self._unsaved = True
        if done[phase][0] != asked:
            raise InputError(f"this site answered another '{phase}' of this round, and answers it only once")
        if self._unsaved and self._keep is not None:
            self._keep(self.state)
        self._unsaved = False
        return done[phase][1]

    @property
    def _round(self) -> Round:
        if self.progress.round_ is None:
            raise InputError("this site is in no round; send it the round first")
        return self.progress.round_

    def _read(self, question: bytes, kind: str) -> Message:
        return read(question, kind, self._round, self.roster)

    def _write(self, kind: str, fixed: bytes = b"", records: dict[int, bytes] | None = None) -> bytes:
        return write(Message(kind, self.number, fixed, records or {}), self._round)

    def _pair(self, other: int) -> Pair:
        return Pair(self._round, self.name, self.roster.names[other])

    # ------------------------------------------------------------------------------------------------- the phases

    def _advertisement(self, round_: Round) -> bytes:
        progress = self.progress
        progress.encryption, progress.mask, progress.seed = new_key(), new_key(), new_key()
        commitment = seed_commitment(round_, self.name, progress.seed)
        bare = Advertisement(public_of(progress.encryption), public_of(progress.mask), commitment)
        return self._write("advertisement", bare.signed_by(self.identity, round_, self.name).to_bytes())

    def _shares(self, message: Message) -> bytes:
        progress, needed = self.progress, self.roster.holders_needed
        advertised = {number: Advertisement.from_bytes(data) for number, data in message.records.items()}
        if not advertised.keys() <= self.roster.neighbours(self.number):
            raise InputError("keys of members given that are not neighbours of this site")
        for number, advertisement in advertised.items():
            self._check_advertisement(advertisement, self.roster.names[number])
        if len(advertised) + 1 < needed:
            raise InputError(f"keys of {len(advertised)} neighbours given; {needed - 1} are needed. Wait for more")
        holders = [number + 1 for number in (*advertised, self.number)]
        of_key, of_seed = (split(secret, needed, holders) for secret in (progress.mask, progress.seed))
        both = {holder - 1: of_key[holder] + of_seed[holder] for holder in holders}
        own = both.pop(self.number)
        sealed = {number: self._sealed(number, advertised[number], shares) for number, shares in both.items()}
        progress.own, progress.advertised = own, advertised
        return self._write("shares", records=sealed)

    def _check_advertisement(self, advertisement: Advertisement, name: str) -> None:
        if not advertisement.is_of(name, self._round, self.roster):
            raise InputError(f"keys for '{name}' given that the roster's '{name}' did not sign for this round")

    def _sealed(self, holder: int, advertisement: Advertisement, shares: bytes) -> bytes:
        key = self._pair(holder).sending_key(self.progress.encryption, advertisement.encryption)
        return encrypt(key, shares, self._round.id)

    def _delivered(self, message: Message, length: int, told: bytes) -> bytes:
        """Keep the neighbours' shares; the masked vector itself is made again whenever it is asked for."""
        progress, partners = self.progress, members_of(message.fixed, self.roster)
        if length != self._round.length:
            raise InputError(f"a vector of {length} numbers given; this round is for {self._round.length}")
        self.roster.check_survivors(partners, self.minimum)
        if self.number not in partners:
            raise InputError("this site is not on the list of those that share; it sends nothing")
        near = partners & self.roster.neighbours(self.number)
        if message.records.keys() != near or not near <= progress.advertised.keys():
            raise InputError("the shares given are not those of all neighbours on the list")
        progress.partners, progress.shares, progress.vector = message.fixed, dict(message.records), told
        return b""

    def _masked(self, numbers: Words) -> bytes:
        """The masked vector, and a signature of the list against which it is masked."""
        progress, round_ = self.progress, self._round
        masks = [(seed_key(round_, self.name, progress.seed), True)]
        for number in progress.shares:
            pair = self._pair(number)
            masks.append((pair.mask_key(progress.mask, progress.advertised[number].mask), pair.adds))
        add_masks(numbers, masks)
        receipt = sign(self.identity, masked_with(round_, self.name, progress.partners))
        return self._write("masked", receipt + pack(numbers, round_.bits))

    def _confirmation(self, message: Message) -> bytes:
        survivors = members_of(message.fixed, self.roster)
        self._check_survivors(survivors)
        self._check_receipts(survivors & self.roster.neighbours(self.number), message.records)
        self.progress.survivors = message.fixed
        return self._write("confirmation", sign(self.identity, survived(self._round, message.fixed)))

    def _check_survivors(self, survivors: frozenset[int]) -> None:
        self.roster.check_survivors(survivors, self.minimum)
        if self.number not in survivors:
            raise InputError("this site sent its masked vector and is not on the list of survivors; it unmasks nothing")
        if not survivors <= members_of(self.progress.partners, self.roster):
            raise InputError("the list of survivors has members that shared no keys; this site unmasks nothing")

    def _check_receipts(self, near: frozenset[int], receipts: Any) -> None:
        """Each neighbour on the list signed that it masked against the very list that this site masked against."""
        if receipts.keys() != near:
            raise InputError("the signatures given are not those of all neighbours on the list of survivors")
        for number in near:
            name = self.roster.names[number]
            statement = masked_with(self._round, name, self.progress.partners)
            if not is_signed(self.roster.keys[name], receipts[number], statement):
                raise InputError(f"'{name}' did not sign that it masked against the same list; nothing is unmasked")

    def _unmasking(self, message: Message) -> bytes:
        progress = self.progress
        survivors = members_of(progress.survivors, self.roster)
        self._check_signatures(survivors, message.records)
        near = {number: self._opened(number) for number in progress.shares} | {self.number: progress.own}
        return self._write("unmasking", records={
            number: _one_of(shares, number in survivors) for number, shares in near.items() if shares is not None
        })  # fmt: skip

    def _check_signatures(self, survivors: frozenset[int], signatures: Any) -> None:
        """Raise unless the threshold of survivors signed the very list that this site signed."""
        statement, valid = survived(self._round, self.progress.survivors), 0
        for number in survivors & signatures.keys():
            valid += is_signed(self.roster.keys[self.roster.names[number]], signatures[number], statement)
            if valid == self.roster.threshold:
                return
        raise InputError(
            f"{valid} members signed the list of survivors that this site signed; {self.roster.threshold} are needed. "
            "This site unmasks nothing"
        )

    def _opened(self, number: int) -> bytes | None:
        """A neighbour's shares, or None if it sent others than it should."""
        progress = self.progress
        key = self._pair(number).receiving_key(progress.encryption, progress.advertised[number].encryption)
        return decrypt(key, progress.shares[number], self._round.id)


def _one_of(shares: bytes, survived: bool) -> bytes:
    """The share of a survivor's seed, or of the mask key of one that dropped out; never both."""
    return SEED_SHARE + shares[SHARE_BYTES:] if survived else KEY_SHARE + shares[:SHARE_BYTES]
