"""The server's side of a federation: it takes bytes, checks them, adds them, and publishes.

Everything it knows is in its ledger, so it can be killed at any moment and made again from the folder alone; nobody
who has answered is asked again. It needs no network: a transport hands it what arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np

from apfl.errors import InputError
from apfl.federate import intake, leaving, publishing
from apfl.federate.blobs import FolderError
from apfl.federate.choosing import Sent, summed_tables
from apfl.federate.influence import influence_of_members
from apfl.federate.intake import Receipt
from apfl.federate.landmarks import draw, load_landmarks, open_spread, read_landmarks
from apfl.federate.ledger import Ledger, Row
from apfl.federate.masked import leaving as masked_leaving
from apfl.federate.masked.tables import choice_of_sums
from apfl.federate.messages import open_description, open_table, seal_choice
from apfl.federate.names import check_name
from apfl.federate.numbers.server import NumberChoice
from apfl.federate.numbers.server import draw as draw_numbers
from apfl.federate.piloting import Choice, Piloting, Stage
from apfl.federate.pool import Pool
from apfl.federate.private import account
from apfl.federate.private.publishing import check_room, room_for
from apfl.federate.public import keep_public, named, public_spread
from apfl.federate.publishing import Publication
from apfl.federate.roll import Roll, attached
from apfl.federate.status import status
from apfl.federate.terms import Description, Terms, settle
from apfl.federate.usable import usable
from apfl.federate.wire import sha256

__all__ = ["Coordinator", "Publication", "Receipt"]

LANDMARKS = "landmarks.safetensors"


class Coordinator:
    """One federation in one folder; ``terms`` are needed the first time, and must agree with the folder after that.

    ``wait`` is how many seconds to wait for another process that works in the folder. Wherever a message is taken,
    ``sender`` is the name that the transport vouches for.
    """

    def __init__(self, folder: str | Path, terms: Terms | None = None, *, wait: float = 0.0) -> None:
        self.ledger = Ledger(folder, wait=wait)
        self._roll: tuple[tuple[int, str], Roll] | None = None  # of the publication with this number and hash
        try:
            self.draft = self._draft(terms)
            self._outline = self._agreed("outline")
            self._piloting = Piloting(self.ledger, self.draft, self._agreed("trial"))
            self._terms = self._agreed("terms")
            publishing.retire_damaged(self.ledger)
            account.forget_departed(self.ledger)  # a server that was killed may have left them
            self._pool = None if self._terms is None else self._open_pool(self._terms)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Let go of the folder."""
        self.ledger.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # ------------------------------------------------------------------------------------------- agreeing

    def invitation(self) -> bytes:
        """The draft of the terms, for clients to describe themselves under."""
        return self.draft.to_json().encode()

    def describe(self, data: bytes, sender: str | None = None) -> Receipt:
        """Take a client's description."""
        return self._written_down(
            "description", data, sender,
            lambda: intake.take_description(self.ledger, self.draft, self._terms, data, sender),
        )  # fmt: skip

    def outline(self) -> bytes:
        """With landmarks: fix all but them from the descriptions at hand, once; afterwards, what was fixed.

        If the normalisation is open, the pilot's tables at hand choose it.
        """
        if self._outline is None:
            self._not_masked("outline")
            self._outline = self._fix("outline", self._piloting.choose() if self.draft.pilots else None)
        return self._outline.to_json().encode()

    def trial(self) -> bytes:
        """The terms of the pilot that chooses the normalisation; fixed from the descriptions at hand, once."""
        if self._piloting.terms is None:
            if not self.draft.pilots:
                raise InputError("these terms state the normalisation, so no pilot chooses it")
            kept, left_out = self._usable()

            def keep(terms: Terms) -> None:
                intake.leave_out(self.ledger, left_out)
                self._keep("trial", terms)

            self._piloting.begin(kept, keep)
        assert self._piloting.terms is not None
        return self._piloting.terms.to_json().encode()

    @property
    def piloting(self) -> Stage:
        """What the pilot waits for: statistics, tables, or nothing if none is under way."""
        return self._piloting.stage

    def pilot_question(self) -> bytes:
        """What sites try under the terms of the pilot."""
        return self._piloting.asked

    def pilot_statistics(self, data: bytes, sender: str | None = None) -> Receipt:
        """Take a client's statistics under every normalisation."""
        return self._written_down(
            "pilot statistics", data, sender, lambda: self._piloting.take_statistics(data, sender)
        )

    def pilot_primaries(self, client: str | None = None) -> bytes:
        """The primary under every normalisation, from the statistics at hand, once; afterwards the same.

        For a ``client``: with the proof that its statistics are behind them.
        """
        return self._piloting.primaries() if client is None else self._piloting.primaries_for(client)

    def pilot_table(self, data: bytes, sender: str | None = None) -> Receipt:
        """Take a client's left-out hits under every normalisation."""
        return self._written_down("pilot table", data, sender, lambda: self._piloting.take_table(data, sender))

    def restart_pilot(self, files: Sequence[str]) -> None:
        """A pilot under way begins anew, after a client left that had a part in it; the ledger has these files left."""
        if files:
            self._piloting.restarted()
            self.ledger.blobs.remove(files)

    def spread(self, data: bytes, sender: str | None = None) -> Receipt:
        """Take the moments of a client's normalised rows, from which landmarks are drawn."""
        return self._written_down(
            "spread", data, sender,
            lambda: intake.take_spread(self.ledger, self._outline, self._terms, data, sender),
        )  # fmt: skip

    def settle(self) -> bytes:
        """Fix the terms from the descriptions at hand, once; afterwards, the terms that were fixed.

        Clients whose description cannot be settled with the others' (`usable`) are left out, and the ledger names them.
        Landmarks are drawn from the moments at hand.
        """
        if self._terms is None:
            self._not_masked("terms")
            self._terms = self._draw() if self.draft.landmarked else self._fix("terms")
            self._pool = self._open_pool(self._terms)
        return self._terms.to_json().encode()

    def _usable(self) -> tuple[list[Description], list[tuple[Description, str]]]:
        """The descriptions at hand that can be settled together, and the others with the reason."""
        rows = self.ledger.descriptions()
        self._check_quorum(len(rows))
        kept, left_out = usable(self.draft, [open_description(row["data"], self.draft) for row in rows])
        self._check_quorum(len(kept), [each.client for each, _ in left_out])
        return kept, left_out

    def _fix(self, what: str, choice: Choice | None = None) -> Terms:
        """Terms from the descriptions at hand, kept as the outline or as the settled terms."""
        kept, left_out = self._usable()
        files: list[str] = []
        terms = settle(self.draft, kept, None if choice is None else choice.normalise)
        terms = terms if choice is None else replace(terms, pilot=choice.hits)
        with self.ledger.transaction():
            intake.leave_out(self.ledger, left_out)
            if choice is not None:
                choice.write(self.ledger)
                files = self.ledger.empty_pilot()
            self._keep(what, terms)
        self.ledger.blobs.remove(files)
        if files:
            self.ledger.scrub()
        return terms

    def _draw(self) -> Terms:
        """The outline with its landmarks."""
        outline = Terms.from_json(self.outline())
        if self.draft.numeric:
            self._check_spread(outline)
            return self._kept(*draw_numbers(outline, (row["data"] for row in self.ledger.spreads())))
        self._check_spread(outline)
        # One at a time: those of all clients may not fit into memory.
        return self._drawn(outline, (open_spread(row["data"], outline).integers for row in self.ledger.spreads()))

    def _check_spread(self, outline: Terms) -> None:
        n_spreads = len(self.ledger.answered("spreads"))
        if outline.spread is not None and n_spreads < self.draft.quorum:
            raise InputError(
                f"{n_spreads} clients have sent the moments that landmarks are drawn from; the quorum is "
                f"{self.draft.quorum}"
            )

    def _drawn(self, outline: Terms, spreads: Iterable[np.ndarray]) -> Terms:
        return self._kept(*draw(outline, spreads, public_spread(self.ledger, outline)))

    def _kept(self, terms: Terms, data: bytes) -> Terms:
        """Settled terms, with the message that has their landmarks."""
        self.ledger.blobs.put(LANDMARKS, data)
        with self.ledger.transaction():
            self.ledger.put("landmarks", LANDMARKS)
            self.ledger.empty_spreads()
            self._keep("terms", terms)
        self.ledger.scrub()
        return terms

    def pilot_from(self, terms: Terms, question: bytes) -> None:
        """Under masks: the pilot begins, from the sum of the sites' moments."""
        self._piloting.start(terms, question, lambda trial: self._keep("trial", trial))

    @property
    def pilot(self) -> Piloting:
        """The pilot, under way or not."""
        return self._piloting

    def outline_from(self, outline: Terms, choice: Choice | None = None) -> None:
        """Under masks: all but the landmarks is fixed, from the sum of the sites' counts and what a pilot chose."""
        assert self._outline is None
        files: list[str] = []
        with self.ledger.transaction():
            if choice is not None:
                choice.write(self.ledger)
                files = self.ledger.empty_pilot()
            self._keep("outline", outline)
        self._outline = outline
        self.ledger.blobs.remove(files)

    def settle_from(self, spreads: Sequence[np.ndarray]) -> None:
        """Under masks: draw landmarks from the sum of the sites' moments, or from none."""
        assert self._outline is not None
        self._terms = self._drawn(self._outline, spreads)
        self._pool = self._open_pool(self._terms)

    def _keep(self, what: str, terms: Terms) -> None:
        """Write terms down; inside a transaction."""
        self.ledger.put(what, terms.to_json())
        self.ledger.put(f"{what}_digest", terms.digest)
        event = {"terms": "settled", "outline": "outlined", "trial": "piloting"}[what]
        width = None if terms.trying else terms.width
        self.ledger.event(event, width=width, classes=terms.n_classes, digest=terms.digest)

    def _open_pool(self, terms: Terms) -> Pool:
        return Pool(self.ledger, terms, load_landmarks(self.ledger, terms))

    @property
    def spreading(self) -> bool:
        """Whether the moments behind the landmarks are what is waited for."""
        return self._outline is not None and self._outline.spread is not None and self._terms is None

    def landmarks(self) -> bytes:
        """The message with the landmarks of the settled terms, for a site to keep."""
        return read_landmarks(self.ledger, self.terms)

    def kept_landmarks(self, client: str) -> None:
        """A client has the landmarks: it need not be sent them again."""
        with self.ledger.transaction():
            self.ledger.know(check_name("client", client))
            self.ledger.write_landmarks_kept(client)

    def lost_landmarks(self, client: str) -> None:
        """A client failed to answer: it is sent the landmarks again with the next question."""
        with self.ledger.transaction():
            self.ledger.drop_landmarks_kept(client)

    def _not_masked(self, what: str) -> None:
        if self.draft.masked:
            raise InputError(f"there are no settled terms yet: under masks the {what} come from sums over a cohort")

    def _check_quorum(self, n_described: int, left_out: Sequence[str] = ()) -> None:
        if n_described < self.draft.quorum:
            odd = f"; those of {', '.join(left_out)} cannot be settled with theirs" if left_out else ""
            raise InputError(
                f"{n_described} clients have described themselves, with features of one width and classes within "
                f"bounds{odd}; the quorum is {self.draft.quorum}"
            )

    @property
    def settled(self) -> bool:
        """Whether the terms are fixed."""
        return self._terms is not None

    @property
    def agreed(self) -> Terms:
        """What is fixed so far: the settled terms, their outline, those of the pilot, or the draft."""
        return self._terms or self._outline or self._piloting.terms or self.draft

    @property
    def terms(self) -> Terms:
        """The settled terms."""
        if self._terms is None:
            raise InputError("the terms are not settled yet: clients must describe themselves first")
        return self._terms

    @property
    def pool(self) -> Pool:
        """Contributions and their sum."""
        if self._pool is None:
            raise InputError("the terms are not settled yet: clients must describe themselves first")
        return self._pool

    # --------------------------------------------------------------------------------------- contributing

    def accept(self, data: bytes, sender: str | None = None) -> Receipt:
        """Take a contribution: checked, written down, counted once."""
        return self._written_down("statistics", data, sender, lambda: self._accept(data, sender))

    def rejoin(self, data: bytes, sender: str | None = None, former: bytes | None = None) -> Receipt:
        """Take a contribution in place of the client's former one: it leaves and joins in one step.

        With ``keep_contributions`` off the client brings the ``former`` bytes too. Until the next publication there is
        no current one.
        """
        return self._written_down(
            "statistics", data, sender,
            lambda: self._rejoin(data, sender, former),
        )  # fmt: skip

    def _rejoin(self, data: bytes, sender: str | None, former: bytes | None) -> Receipt:
        self._check_account(data)
        taken = intake.take_rejoin(self.ledger, self.pool, self.draft, self.terms, data, sender, former)
        if self.draft.private:
            account.forget_departed(self.ledger)
        return self._counted(taken)

    def _accept(self, data: bytes, sender: str | None) -> Receipt:
        self._check_account(data)
        return self._counted(intake.take_contribution(self.ledger, self.pool, self.draft, self.terms, data, sender))

    def _check_account(self, data: bytes) -> None:
        """Under epsilon: refuse a contribution that no release is left for."""
        if self.terms.private and self.ledger.contribution(sha256(data)) is None:
            check_room(self.ledger, self.terms)

    def _counted(self, receipt: Receipt) -> Receipt:
        """Fold in what was accepted if only sums are kept, unless it waits for its cohort."""
        if receipt.outcome != "accepted":
            return receipt
        if self._held_back():
            waiting = f"{self.pool.n_pending()} of {self.terms.min_cohort} late clients are here"
            reason = f"counts once the cohort is complete: {waiting}"
            return Receipt("withheld", receipt.client, reason, receipt.sha256, receipt.n_bytes)
        if not self.terms.keep_contributions:
            self.pool.fold()
        return receipt

    def ready(self) -> bool:
        """Whether there is something to publish: the quorum for the first time, a complete cohort, or someone left."""
        if self._pool is None:
            return False
        n_pending = 0 if self._held_back() else self._pool.n_pending()
        enough = self.ledger.n_contributions(folded=True) + n_pending >= self.terms.quorum
        return enough and (n_pending > 0 or not self._is_published()) and self._affords(n_pending)

    def _affords(self, n_pending: int) -> bool:
        """Whether the account has room for the sum that would be published next."""
        if not self.terms.private:
            return True
        folded = (True, False) if n_pending else (True,)
        rows = [row for each in folded for row in self.ledger.contributions(folded=each)]
        return room_for(self.ledger, self.terms, {row["client"]: row["sha256"] for row in rows})

    def _is_published(self) -> bool:
        """Whether the current publication is of the members there are now."""
        current = self.ledger.current()
        return current is not None and self.ledger.members(current["number"]) == self.pool.members()

    def _held_back(self) -> bool:
        """Whether the pending contributions wait for a cohort."""
        return self.pool.holds_back(self.pool.n_pending())

    # ----------------------------------------------------------------------------------------- publishing

    def publish(self) -> Publication:
        """Fold in what may be folded and publish the primary; the current one if nothing has changed."""
        if not self._held_back():
            self.pool.fold()
        n_members = len(self.pool.members())
        if n_members < self.terms.quorum:
            raise InputError(f"{n_members} clients have contributed; the quorum is {self.terms.quorum}")
        return publishing.publish(self.ledger, self.pool, self.terms)

    def current(self) -> Publication | None:
        """The current publication; None before the first, and while one has to be made anew."""
        row = self.ledger.current()
        return None if row is None else publishing.load(self.ledger, row)

    def deliver(self, client: str) -> bytes:
        """The current publication with the proof that this client is in it, and a note that it now holds it."""
        row = self.ledger.current()
        if row is None:
            raise InputError("nothing is published yet")
        data, digest = (
            publishing.read(self.ledger, row),
            self.ledger.member(row["number"], check_name("client", client)),
        )
        with self.ledger.transaction():
            self.ledger.write_holder(client, row["number"])
        return data if digest is None else attached(data, self._roll_of(row).proof(digest))

    def _roll_of(self, publication: Row) -> Roll:
        """The members of a publication, whose tree is made once."""
        key = publication["number"], publication["sha256"]
        if self._roll is None or self._roll[0] != key:
            self._roll = key, Roll(self.ledger.members(publication["number"]).values())
        return self._roll[1]

    def confirm(self, client: str, number: int) -> None:
        """A client has refitted to this publication, and no longer holds an earlier one."""
        with self.ledger.transaction():
            self.ledger.write_confirmed(client, number)

    # ------------------------------------------------------------------------------------------- choosing

    def table(self, data: bytes, sender: str | None = None) -> Receipt:
        """Take a client's table of left-out hits under the current publication, or of the stage that is waited for."""
        return self._written_down("table", data, sender, lambda: self._table(data, sender))

    def _table(self, data: bytes, sender: str | None) -> Receipt:
        if self.terms.numeric:
            return self._number_choice.take(data, sender)
        return intake.take_table(self.ledger, self.terms, data, sender)

    @property
    def _number_choice(self) -> NumberChoice:
        return NumberChoice(self.ledger, self.pool, self.terms)

    @property
    def stage(self) -> str:
        """With columns as targets, the stage of the choice whose tables are waited for; empty otherwise."""
        current = self.ledger.current()
        if current is None or self._terms is None or not self._terms.numeric:
            return ""
        return self._number_choice.stage(current["number"])

    def chosen_so_far(self) -> bytes:
        """What the stages before this one have chosen for the current publication; empty before the first."""
        current = self.ledger.current()
        return b"" if current is None else self._number_choice.so_far(current["number"])

    def choose_stage(self) -> str:
        """End the stage that is waited for, with the tables at hand; its name."""
        current = self.ledger.current()
        if current is None or not self.stage:
            raise InputError("no stage of a choice waits for tables")
        return self._number_choice.choose(current)

    def choose(self) -> bytes:
        """The settings that the tables at hand choose, for everyone."""
        current = self.ledger.current()
        if current is None:
            raise InputError("nothing is published yet, so there is nothing to choose settings for")
        if self.terms.numeric:
            return self._number_choice.chosen(current["number"])
        if self.terms.masked:
            return choice_of_sums(self.ledger, self.terms, current)
        number, terms = current["number"], self.terms

        def tables() -> Iterator[Sent]:
            for row in self.ledger.tables(number):
                yield row["sha256"], open_table(row["data"], terms).hits, row["n"]

        summed = summed_tables(tables, len(terms.choice.weights))
        if terms.wants_tables and not summed.hashes:
            raise InputError("no client has sent a table of left-out hits yet")
        return seal_choice(terms, number, current["unit"], summed.hits, summed.hashes, summed.n_rows)

    def metrics(self, data: bytes, sender: str | None = None) -> Receipt:
        """Take what a client chose to report about its model."""
        return self._written_down("metrics", data, sender, lambda: self._measured(data, sender))

    def _measured(self, data: bytes, sender: str | None) -> Receipt:
        if self.terms.numeric:
            raise InputError("numbers and labels have no accuracy that a server could keep")
        if self.terms.private:
            raise InputError("an accuracy would tell of rows without noise; under epsilon none is taken")
        return intake.take_metrics(self.ledger, self.terms, data, sender)

    def _written_down(self, what: str, data: bytes, sender: str | None, take: Callable[[], Receipt]) -> Receipt:
        """What becomes of a message of one client; under masks there is no such message."""
        if not self.draft.masked:
            return intake.written_down(self.ledger, what, data, sender, take)
        return self.refuse(sender, what, "a message of one site alone; under these terms only sums are known")

    def refuse(self, client: str | None, what: str, reason: str) -> Receipt:
        """Write down that what a client sent could not even be handed over."""

        def refused() -> Receipt:
            raise InputError(reason)

        return intake.written_down(self.ledger, what, b"", client, refused)

    # -------------------------------------------------------------------------------------------- leaving

    def leave(self, client: str, data: bytes | None = None) -> leaving.Evidence:
        """Take a client out: from here on everything is as if it had never joined. See `apfl.federate.leaving`."""
        return self._leave(client, data, forget=False)

    def forget(self, client: str, data: bytes | None = None) -> leaving.Evidence:
        """`leave`, and erase the client's name from the ledger too."""
        return self._leave(client, data, forget=True)

    def _leave(self, client: str, data: bytes | None, *, forget: bool) -> leaving.Evidence:
        if self.draft.masked:
            return masked_leaving.leave(self, client, forget=forget)
        evidence = leaving.leave(self, client, data, forget=forget)
        return self._without_departed(evidence) if self.draft.private else evidence

    def _without_departed(self, evidence: leaving.Evidence) -> leaving.Evidence:
        """Under epsilon: noisy sums with the client go too; what its charges and the account say stays."""
        account.forget_departed(self.ledger)
        if not evidence.deleted or evidence.publication is not None or len(self.pool.members()) < self.terms.quorum:
            return evidence
        spent = "nothing is published any more: the account has no room for a release without it"
        return replace(evidence, remains=(*evidence.remains, spent))

    def check_redraw(self) -> None:
        """Refuse to draw landmarks anew if they owe nothing to the members, or if only sums over sites are known."""
        if self.draft.masked:
            raise InputError(
                "new landmarks under masked terms asked for: sites sum up their moments once, or two sums would tell "
                "one site's. Leave without, or start a new federation"
            )
        if not self.draft.landmarked or self.draft.method.landmarks != "federation" or not self.settled:
            raise InputError(
                "new landmarks asked for, but none were drawn here from the members' moments; leave without"
            )

    def redraw(self) -> None:
        """Settle anew, with landmarks from the members that remain: they are asked for everything but descriptions."""
        self.check_redraw()
        with self.ledger.transaction():
            files = self.ledger.unsettle()
        self.ledger.blobs.remove(files)
        self.ledger.scrub()
        self._outline = self._terms = self._pool = None
        self._piloting.restarted()

    def contribution_of(self, client: str) -> str | None:
        """The hash of what a client contributed: with ``keep_contributions`` off it must bring those bytes to leave."""
        row = self.ledger.contribution_of(self.known(client))
        return None if row is None else str(row["sha256"])

    def known(self, client: str) -> str:
        """The client's name, if it is one of those here."""
        return self.ledger.known(client)

    def influence(self) -> dict[str, float]:
        """Each member's influence on the current publication, by name (`apfl.federate.influence`)."""
        private = self.draft.private or self.draft.numeric  # it would tell of a member's rows without noise
        found = influence_of_members(self.ledger, self.pool, self.terms) if self.settled and not private else {}
        members = self.pool.members() if found else {}
        return {client: found[digest] for client, digest in members.items() if digest in found}

    def status(self) -> dict[str, Any]:
        """Where the federation stands, as plain values; `apfl.federate.status.status_of` reads it from the folder."""
        return status(self.ledger)

    def _agreed(self, what: str) -> Terms | None:
        stored, digest = self.ledger.get(what), self.ledger.get(f"{what}_digest")
        terms = None if stored is None else Terms.from_json(stored)
        if terms is not None and digest not in (None, terms.digest):
            raise FolderError(f"the terms in {self.ledger.folder} have changed on disk; restore it from a backup")
        return terms

    def _draft(self, terms: Terms | None) -> Terms:
        stored, public = self.ledger.get("draft"), None
        if terms is not None:
            terms, public = named(terms)
        if stored is None:
            if terms is None:
                raise InputError(f"{self.ledger.folder} holds no federation yet; give its terms")
            with self.ledger.transaction():
                if public is not None:
                    keep_public(self.ledger, public)
                self.ledger.put("draft", terms.to_json())
                self.ledger.event("opened", federation=terms.federation)
            return terms
        draft = Terms.from_json(stored)
        if terms is not None and terms != draft:
            raise InputError(
                f"{self.ledger.folder} holds federation {draft.federation!r} under other terms "
                f"({terms.departs_from(draft) or 'some left open'}); start it with those, or choose another folder"
            )
        return draft
