"""A site under masked terms: it answers the phases of rounds, and nothing else leaves it.

Before it takes part in a round, the site checks that the round is of its roster and its terms, and that the sum reveals
no more than the bounds of `counts` allow. It unmasks one sum for each purpose: of two sums over different members the
difference would tell a single site. The same sum may be unmasked again, by a server that was killed.
"""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np

from apfl.errors import InputError
from apfl.federate.contribution import decode
from apfl.federate.landmarks import open_spread
from apfl.federate.masked.counts import Counts
from apfl.federate.masked.pilot import Trial, counted, own_moments, tried_under
from apfl.federate.masked.purposes import Purpose, round_of
from apfl.federate.secure import PHASES, Member, Round
from apfl.federate.secure.ciphers import digest, labelled
from apfl.federate.secure.digits import Digits
from apfl.federate.site import Site
from apfl.federate.terms import Terms
from apfl.federate.wire import sha256
from apfl.maths.bits import Layout

__all__ = ["MaskedSite", "token"]

UNMASKED = "unmasked.json"
QUESTION, PRIMARIES, PILOTED = "pilot.safetensors", "pilot-primaries.safetensors", "pilot.token"


def token(round_: Round, name: str) -> str:
    """By what a publication names a member: the server knows no hash of what it contributed."""
    return digest(labelled("member", round_.id, name.encode())).hex()


class MaskedSite:
    """A `Site` that takes part as a `Member` of a roster; ``report`` is whether it counts in the sum of metrics."""

    def __init__(self, site: Site, member: Member, *, report: bool = True) -> None:
        self.site, self.member, self.report = site, member, report

    def answer(
        self, phase: str, question: bytes, agreement: bytes, counts: bytes | None = None,
        publication: bytes | None = None, pilot: bytes | None = None, primaries: bytes | None = None,
    ) -> bytes:  # fmt: skip
        """The answer to one question of a round under these terms.

        ``counts`` come with every round but the first, ``publication`` with the first question of one for a table,
        ``pilot`` and ``primaries`` with those of a pilot.
        """
        if phase not in PHASES:
            raise InputError(f"a question of phase '{phase[:40]}' given; allowed are {', '.join(PHASES)}")
        terms = self._agreed(agreement)
        told = self._counted(terms, counts)
        for name, data in ((QUESTION, pilot), (PRIMARIES, primaries)):
            if data is not None:
                self.site.write(terms, name, data)
        round_ = Round.from_bytes(question) if phase == "advertise" else self._round()
        purpose = Purpose.of(round_)
        trial = self._trial(purpose, terms, told)
        digits = self._checked(round_, purpose, terms, told, trial)
        if phase in ("advertise", "mask"):
            # Before it begins, too: what cannot be made is said then.
            vector = self._vector(purpose, digits.layout, terms, told, publication, trial)
        if phase == "advertise":
            return self.member.advertise(question)
        if phase == "mask":
            return self._mask(question, purpose, digits, terms, vector)
        if phase == "confirm":
            return self._confirm(question, terms)
        if phase == "unmask" and terms.private:  # from here on the sum may be known
            self.site.account(terms).charge(self.member.roster)
        if phase == "unmask":
            return self._unmask(question, terms)
        return self.member.share(question)

    # ------------------------------------------------------------------------------------------------- checks

    def _agreed(self, agreement: bytes) -> Terms:
        terms = self.site.unchanged(Terms.from_json(agreement))
        if not terms.masked:
            raise InputError("terms without masks given to a site that takes part under masks only; nothing was sent")
        if self.member.minimum < terms.smallest_sum:
            raise InputError(
                f"the terms promise sums of {terms.smallest_sum} sites or more; this site would unmask one of "
                f"{self.member.minimum}. Start it with the roster of these terms"
            )
        return terms

    def _counted(self, terms: Terms, data: bytes | None) -> Counts | None:
        """The cohort's counts, if this site's rows are in them or may follow them; kept for the rounds to come."""
        if data is None:
            return None
        counts = Counts.from_bytes(data)
        if counts.roster != self.member.roster.fingerprint:
            raise InputError("counts of another roster than this site confirmed; nothing was sent")
        counts.check(terms)
        self.site.keep_counts(terms, counts)
        return counts

    def _round(self) -> Round:
        if self.member.progress.round_ is None:
            raise InputError("this site is in no round; send it the round first")
        return self.member.progress.round_

    def _trial(self, purpose: Purpose, terms: Terms, counts: Counts | None) -> Trial | None:
        """The pilot that a round is for, from what was kept of it."""
        if purpose.what not in ("pilot", "hits") or not terms.trying:
            return None
        question, primaries = (self._read(terms, name) for name in (QUESTION, PRIMARIES))
        return tried_under(terms, counts, question, primaries if purpose.what == "hits" else None)

    def _read(self, terms: Terms, name: str) -> bytes | None:
        path = self.site.home(terms) / name
        return path.read_bytes() if path.is_file() else None

    def _checked(
        self, round_: Round, purpose: Purpose, terms: Terms, counts: Counts | None, trial: Trial | None
    ) -> Digits:
        """How vectors are digits in this round, which must be the one that this site would make itself."""
        if terms.private and (purpose.what != "statistics" or counts is not None):
            raise InputError(
                f"a round of '{purpose.what}' given; under epsilon statistics with noise are all that leaves this "
                "site. Nothing was sent"
            )
        if purpose.what != "count" and counts is None and not terms.private:
            raise InputError(f"a round of '{purpose.what}' given without the counts of the cohort; nothing was sent")
        landmarks = self.site.agreed_landmarks(terms) if purpose.what == "statistics" else None
        expected, digits = round_of(purpose, round_.number, self.member.roster, terms, counts, landmarks, trial)
        if round_ != expected:
            field = next(key for key in round_.__dataclass_fields__ if getattr(round_, key) != getattr(expected, key))
            raise InputError(f"a round with another {field} than these terms have; nothing was sent")
        return digits

    # ------------------------------------------------------------------------------------------------- phases

    def _mask(self, question: bytes, purpose: Purpose, digits: Digits, terms: Terms, vector: np.ndarray) -> bytes:
        answer = self.member.mask(question, digits.split(vector))
        # From here on it may be in the sum, also if it drops out.
        if purpose.what == "statistics":
            self.site.note_membership(terms, token(self._round(), self.site.name))
        if purpose.what == "pilot":
            self.site.write(terms, PILOTED, token(self._round(), self.site.name).encode())
        return answer

    def _confirm(self, question: bytes, terms: Terms) -> bytes:
        answer = self.member.confirm(question)
        before = self._unmasked(terms).get(self._key())
        if before not in (None, self.member.progress.survivors.hex()):
            raise InputError(
                "this site has unmasked this sum before, over other members; the difference would tell a single "
                "site. Nothing is unmasked: repeat the sum over the same members, or agree on a new roster"
            )
        return answer

    def _unmask(self, question: bytes, terms: Terms) -> bytes:
        answer = self.member.unmask(question)
        kept = self._unmasked(terms) | {self._key(): self.member.progress.survivors.hex()}
        self.site.write(terms, UNMASKED, json.dumps(kept, sort_keys=True).encode())
        return answer

    def _key(self) -> str:
        """Of a sum, whatever the counts and the settled terms: a server could make others, for a second sum.

        With one landmark changed most columns would be the same, and the difference of the sums would tell a site.
        Statistics are one sum, also if they are made once more with more room.
        """
        purpose = Purpose.of(self._round())
        number = 0 if purpose.what == "statistics" else purpose.number
        return f"{self._round().roster} {purpose.what} {number}"

    def _unmasked(self, terms: Terms) -> dict[str, str]:
        """Purpose -> the members of the sum that this site unmasked."""
        path = self.site.home(terms) / UNMASKED
        try:
            kept: dict[str, str] = json.loads(path.read_text()) if path.exists() else {}
        except (OSError, ValueError) as error:
            raise InputError(f"{path} cannot be read ({error}); restore it, or this site unmasks nothing") from error
        return kept

    # ------------------------------------------------------------------------------------------------ vectors

    def _vector(
        self, purpose: Purpose, layout: Layout, terms: Terms, counts: Counts | None, publication: bytes | None,
        trial: Trial | None,
    ) -> np.ndarray:  # fmt: skip
        """What this site adds to a sum: the same whenever it is asked."""
        site = self.site
        if purpose.what == "count":
            return counted(site, terms)
        if purpose.what == "moments":
            assert counts is not None
            return own_moments(site, terms, counts)
        if trial is not None:
            tried = self._tried if purpose.what == "pilot" else self._hits
            return self._kept(purpose, layout, terms, lambda: tried(trial, layout), trial.digest)
        if purpose.what == "spread":
            return open_spread(site.own_spread(terms), terms).integers
        if purpose.what == "statistics" and terms.private:
            self.site.account(terms).charged(self.member.roster)  # what would pass the budget is refused here
            return site.noisy_vector(terms, self.member.roster)
        if purpose.what == "statistics":
            integers = decode(site.own_statistics(terms), terms).integers
            assert integers is not None
            return integers
        make = self._table if purpose.what == "table" else self._metrics
        return self._kept(purpose, layout, terms, lambda: make(terms, purpose.number, publication))

    def _tried(self, trial: Trial, layout: Layout) -> np.ndarray:
        """A site none of whose rows take part adds zeros."""
        own = self.site.own_pilot(trial.question)
        return np.zeros(layout.size, np.int64) if own is None else np.concatenate(list(own.values()))

    def _hits(self, trial: Trial, layout: Layout) -> np.ndarray:
        """So does one whose statistics are not behind the primaries: no row of it could be left out."""
        told = trial.opened()
        if (self._read(trial.question.terms, PILOTED) or b"").decode() not in told.members:
            return np.zeros(layout.size, np.int64)
        hits, n_rows = self.site.own_pilot_table(trial.question, told)
        return np.append(hits.reshape(-1).numpy(), n_rows)

    def _table(self, terms: Terms, number: int, publication: bytes | None) -> np.ndarray:
        if publication is None:
            raise InputError(f"{self.site.name} has no publication; it must be sent again")
        hits, n_rows = self.site.left_out(terms, number, publication)
        return np.append(hits.reshape(-1).numpy(), n_rows)

    def _metrics(self, terms: Terms, number: int, publication: bytes | None) -> np.ndarray:
        """A site that reports nothing adds zeros, and nobody sees that it does."""
        if not self.report or self.site.test is None or self.site.publication(terms) != number:
            return np.zeros(3, np.int64)
        told = self.site.evaluate(terms.to_json().encode())
        return np.array([round(told["accuracy"] * told["n_test"]), told["n_test"], 1])

    def _kept(
        self, purpose: Purpose, layout: Layout, terms: Terms, make: Callable[[], np.ndarray], under: str = ""
    ) -> np.ndarray:
        """The vector, made once and kept: two that differ in a hit would tell a difference."""
        name = f"masked-{purpose.what}-{purpose.number}-{sha256((terms.digest + under).encode())[:16]}.bin"
        path = self.site.home(terms) / name
        if not path.is_file():
            self.site.write(terms, name, layout.pack(make()).tobytes())
        return layout.unpack(np.frombuffer(path.read_bytes(), np.uint8))
