"""The client's side of a federation. Its rows stay on its disk, and so does its model.

All state is in files under FOLDER/FEDERATION/NAME, since each message may be handled by a process of its own: the draft
that was agreed to, what was sent (it may be asked for again when the client leaves), and the personal model.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apfl.data import load_dataset
from apfl.data.federation import Shard
from apfl.data.fitted_features import about_features
from apfl.data.protocol import Protocol, halving, sharding
from apfl.errors import InputError
from apfl.federate.contribution import Repeats, encode, encode_integers, encode_private
from apfl.federate.disclosure import WhatLeaves, names_under, of_large_classes, select, what_leaves, without_classes
from apfl.federate.fitting import Fitted, left_out_hits, personal_model
from apfl.federate.landmarks import Landmarks, agreed_maps, open_landmarks, seal_spread
from apfl.federate.masked.counts import Counts
from apfl.federate.messages import Broadcast, open_choice, open_publication, seal_description, seal_metrics, seal_table
from apfl.federate.names import check_name
from apfl.federate.pilot import Primaries, Question, open_primaries, open_question, open_statistics, seal_statistics
from apfl.federate.pilot import seal_table as seal_pilot_table
from apfl.federate.private.agreement import encoding_of
from apfl.federate.private.shares import OwnAccount, noisy_vector
from apfl.federate.remember import difference, remembered
from apfl.federate.roll import OfMembers
from apfl.federate.secure.roster import Roster
from apfl.federate.terms import Description, Terms
from apfl.federate.wire import sha256
from apfl.files import make_private, replacing
from apfl.maths.alone import Comparison
from apfl.maths.centred import within
from apfl.maths.dither import Uniform, dither
from apfl.maths.landmarks import Spread, spread
from apfl.maths.leaveout import echo, leaving
from apfl.maths.normalise import described, needs_moments
from apfl.maths.personalise import Plan, plan_of, rule_of
from apfl.maths.pilot import CANDIDATES, Described, describe, fits, pilot_rows
from apfl.models.file import Container, load_model, read, write
from apfl.models.undecided import in_words, undecided

__all__ = ["Site"]

log = logging.getLogger(__name__)

PILOT = "pilot.safetensors"  # what the server asked this site to try


class Site:
    """One client: ``train`` with labels that index ``class_names``, and test rows if it has any.

    ``agreement`` is always the bytes of the settled terms, as `Coordinator.settle` gives them.
    """

    def __init__(
        self,
        folder: str | Path,
        name: str,
        train: Shard,
        class_names: tuple[str, ...],
        test: Shard | None = None,
        about: Mapping[str, Any] | None = None,
        *,
        rounding_seed: int | None = None,
    ) -> None:
        self.folder, self.name = Path(folder), check_name("client", name)
        self.train, self.class_names, self.test = train, class_names, test
        self.about = {"client": name, **(about or {})}  # what the model file says
        self.rounding_seed = rounding_seed  # of integers; None: drawn here, and kept on this disk
        self._landmarks: dict[str, Landmarks] = {}  # by their hash

    @classmethod
    def from_file(
        cls,
        folder: str | Path,
        name: str,
        data: str,
        *,
        test_fraction: float = 0.0,  # a site learns from all its rows, unless it is told to keep some
        test_column: str | None = None,
        group_column: str | None = None,
        seed: int = 0,
        **reading: Any,
    ) -> Site:
        """A client whose features are in a file; some rows may be kept for testing, by column or by share.

        ``reading`` are the options of `load_dataset`.
        """
        dataset = load_dataset(data, **({"target": "classification"} | reading))  # unless another one is stated
        protocol = Protocol(test_fraction=test_fraction, test_column=test_column, group_column=group_column)
        rows, rng = np.arange(len(dataset.labels)), np.random.default_rng(seed)
        train, test = map(sharding(dataset, protocol), halving(dataset, protocol)(rows, rng))
        about = about_features(dataset, protocol)
        if dataset.target != "classification":
            from apfl.federate.numbers.site import NumberSite  # it is a site, too

            cls = NumberSite
        return cls(folder, name, train, dataset.class_names, test if len(test) else None, about)

    # ---------------------------------------------------------------------------------------- what leaves

    def what_leaves(self, agreement: bytes) -> WhatLeaves:
        """What this client would send under these terms, or under an invitation to them."""
        return what_leaves(self.train, self.class_names, Terms.from_json(agreement))

    def describe(self, invitation: bytes) -> bytes:
        """The first message: n, feature width, class names; moments too if the normalisation needs them."""
        draft = self._in_the_clear(Terms.from_json(invitation))
        rows = self._contributed(draft)
        names = names_under(self.class_names, draft)
        present = tuple(names[i] for i in torch.unique(rows.labels).tolist())
        self.write(draft, "draft.json", draft.to_json().encode())
        told = Description(self.name, len(rows), self.train.features.shape[1], present)
        how = draft.method.normalise
        if draft.pilots:
            unsuited = tuple(each for each in CANDIDATES if not fits(each, [self.train.features]))
            told = replace(told, described=describe(rows.features), unsuited=unsuited)
        elif needs_moments(how):
            told = replace(told, moments=described(how, rows.features))
        return seal_description(told, draft)

    def pilot(self, trial: bytes, question: bytes) -> bytes:
        """Statistics of some rows under every normalisation, on a narrow map; the same when asked for twice."""
        terms = self._tried(trial)
        self.write(terms, PILOT, question)
        asked = open_question(question, terms)
        path = self.home(terms) / f"pilot-{sha256((asked.sha256 + self._fingerprint).encode())[:32]}.safetensors"
        if path.is_file():
            return path.read_bytes()
        rows = self._rows_of_pilot(asked)
        data = seal_statistics(asked, rows, self.name, lambda how: self._dither(terms, f"pilot {how}"))
        self.write(terms, path.name, data)
        return data

    def pilot_table(self, trial: bytes, primaries: bytes) -> bytes:
        """How many of those rows each normalisation and setting gets right once they are left out."""
        terms = self._tried(trial)
        path = self.home(terms) / PILOT
        if not path.is_file():
            raise InputError(f"{self.name} was asked for no statistics of this pilot, so it has no table for it")
        question = path.read_bytes()
        asked = open_question(question, terms)
        told = open_primaries(primaries, asked)
        if sha256(self.pilot(trial, question)) not in told.members:
            raise InputError("primaries of a pilot without this site's statistics; it has no table for them")
        return seal_pilot_table(asked, self.name, told.sha256, told.table(asked, self._rows_of_pilot(asked)))

    def _tried(self, trial: bytes) -> Terms:
        """The terms of a pilot."""
        terms = self._in_the_clear(self.unchanged(Terms.from_json(trial)))
        if not terms.trying:
            raise InputError("these terms try no normalisation; nothing was sent")
        return terms

    def _rows_of_pilot(self, asked: Question) -> Shard:
        """The rows that take part: a share of those that are contributed, of classes with enough of them."""
        rows = self._contributed(asked.terms)
        if len(rows) > (asked.terms.most_rows or 0):
            raise InputError(f"{len(rows)} rows; the pilot was made for at most {asked.terms.most_rows}")
        places = torch.zeros(len(rows), dtype=torch.bool)
        places[pilot_rows(len(rows), asked.n_all, self._own_seed(asked.terms))] = True
        few, counts = of_large_classes(places, rows.labels, asked.terms), self._counts(asked.terms)
        if counts is not None:
            return rows.where(few & torch.tensor(counts.in_pilot(asked.n_all))[rows.labels])
        if not bool(few.any()):
            raise self._nothing_to_contribute(asked.terms)
        return rows.where(few)

    def spread(self, outline: bytes) -> bytes:
        """The moments of the normalised rows, from which landmarks are drawn; the same when asked for twice."""
        terms = self._in_the_clear(self.unchanged(Terms.from_json(outline)))
        if not terms.outlined or terms.spread is None:
            raise InputError("these terms draw no landmarks from moments; nothing was sent")
        return self.own_spread(terms)

    def own_spread(self, terms: Terms) -> bytes:
        """The moments as a message, made once; under masks it stays here, and its integers go into a sum."""
        path = self.home(terms) / f"spread-{sha256((self._under(terms) + self._fingerprint).encode())[:32]}.safetensors"
        if path.is_file():
            return path.read_bytes()
        own = self._spread_of_rows(terms)
        if own.n_samples > (terms.most_rows or 0):
            raise InputError(
                f"{own.n_samples} rows; the outline was made for at most {terms.most_rows}. The landmarks are drawn "
                "without them, and their statistics can still join"
            )
        data = seal_spread(own, terms, self.name, self._dither(terms, "spread"))
        self.write(terms, path.name, data)
        return data

    def _spread_of_rows(self, terms: Terms) -> Spread:
        return spread(terms.normaliser()(self._contributed(terms).features), full=terms.spread == "full")

    def keep_landmarks(self, agreement: bytes, data: bytes) -> None:
        """Keep the landmarks of these terms; any others are refused."""
        terms = self._agreed(agreement)
        self._landmarks[terms.landmarks_sha256 or ""] = open_landmarks(data, terms)
        self.write(terms, _landmarks_file(terms), data)

    def statistics(self, agreement: bytes, *, again: bool = False) -> bytes:
        """The contribution: made once, kept, and the same when asked for twice.

        Terms that are not those this client was invited to are refused. ``again`` makes a new contribution, for a
        client that left and comes back.
        """
        return self.own_statistics(self._in_the_clear(self._agreed(agreement)), again=again)

    def own_statistics(self, terms: Terms, *, again: bool = False) -> bytes:
        """The contribution as a message; under masks it stays here, and its integers go into a sum."""
        sent = self._sent(terms)
        if not again:
            for digest, told in sent.items():
                if told["terms"] != self._under(terms) or "masked" in told:
                    continue
                if self._difference(terms, told) is None:
                    return self._kept(terms, digest)
        data = self._encoded(terms, secrets.token_hex(8) if again else "")
        digest = sha256(data)
        self.write(terms, f"sent-{digest}.safetensors", data)
        self._note_sent(terms, digest, sent)
        return data

    def _note_sent(self, terms: Terms, digest: str, sent: dict[str, Any]) -> None:
        """Remember, beside what was sent before, of which rows and under which terms this was made."""
        sent[digest] = {
            "data": self._fingerprint, "terms": self._under(terms), "order": len(sent),
            **self._remembered(terms),
        }  # fmt: skip
        self.write(terms, "settled.json", terms.to_json().encode())
        self.write(terms, "sent.json", json.dumps(sent, sort_keys=True).encode())

    def _encoded(self, terms: Terms, nonce: str) -> bytes:
        """The statistics of the rows that are contributed, as they travel."""
        if terms.private:
            return encode_private(self.own_vector(terms), terms, self.name, nonce or secrets.token_hex(16))
        rows, landmarks = self._contributed(terms), self.agreed_landmarks(terms)
        phi = agreed_maps(terms, rows.features, landmarks)[0](terms.normaliser()(rows.features))
        copies = leaving(rows.features, rows.labels, None).copies
        repeats = Repeats(int(copies.sum()), echo(rows.features))
        if landmarks is None:
            return encode(phi, rows.labels, terms, self.name, nonce, repeats)
        draw = self._dither(terms, f"statistics{nonce}")
        data, saturated = encode_integers(phi, rows.labels, terms, landmarks, self.name, nonce, repeats, draw)
        if saturated:
            log.warning(
                f"{saturated} of {phi.numel()} entries of the activated features of {self.name} were cut back to the "
                "agreed range of the integers: some rows are unlike those that the landmarks were drawn from"
            )
        return data

    def own_vector(self, terms: Terms) -> Tensor:
        """Under epsilon: the sums of the rows as integers, each row brought back to length 1; no noise yet."""
        rows, landmarks = self._contributed(terms), self.agreed_landmarks(terms)
        mapped = agreed_maps(terms, rows.features, landmarks)[0]
        phi = within(mapped(terms.normaliser()(rows.features.double())))
        vector, cut = encoding_of(terms).encode(phi, rows.labels)
        if cut:
            raise InputError(
                f"{cut} sums of {self.name} are beyond the agreed range of the integers: its rows are too many that "
                "are too much alike. Take part with fewer of them"
            )
        return vector

    def noisy_vector(self, terms: Terms, roster: Roster) -> np.ndarray:
        """Under epsilon and masks: these sums with this client's share of the noise; made once for a roster.

        The terms of the first time stay: under others the account would have another budget.
        """
        if not (self.home(terms) / "draft.json").is_file():
            self.write(terms, "draft.json", terms.to_json().encode())
        path = self.home(terms) / f"noisy-{roster.fingerprint[:32]}.bin"
        vector, made = noisy_vector(path, terms, roster, lambda: self.own_vector(terms))
        if made is not None:
            self.write(terms, path.name, made)
            self._note_sent(terms, sha256(made), self._sent(terms))
        return vector

    def account(self, terms: Terms) -> OwnAccount:
        """Under epsilon and masks: what this client has helped to release."""
        return OwnAccount(self.home(terms), terms, lambda name, data: self.write(terms, name, data))

    def changes(self) -> dict[str, str]:
        """Federation -> how the rows differ from those that were last contributed to it."""
        found = {}
        for path in sorted(self.folder.glob(f"*/{self.name}/settled.json")):
            try:
                terms = Terms.from_json(path.read_bytes())
                how = self.changed(terms, _last(self._sent(terms)))
            except InputError as error:  # this federation cannot use the rows; another one may
                how = str(error)
            if how is not None:
                found[path.parent.parent.name] = how
        return found

    def changed(self, terms: Terms, digest: str) -> str | None:
        """How the rows differ from those behind the contribution with this hash; None if not, or if it is not kept."""
        told = self._sent(terms).get(digest)
        return None if told is None else self._difference(terms, told)

    def rejoin(self, agreement: bytes, digest: str) -> dict[str, bytes]:
        """Statistics of the present rows in place of the contribution with this hash; nothing if the rows are its own.

        The same statistics if asked twice. If the server keeps only sums, the former contribution comes along.
        """
        terms = self._in_the_clear(self._agreed(agreement))
        sent = self._sent(terms)
        if digest in sent and self._difference(terms, sent[digest]) is None:
            return {}
        former = {} if terms.keep_contributions else {"former": self.sent(agreement, digest)}
        made = [
            each for each, told in sent.items()
            if digest in sent and told["order"] > sent[digest]["order"] and self._difference(terms, told) is None
        ]  # fmt: skip
        data = self.sent(agreement, made[-1]) if made else self.statistics(agreement, again=True)
        return {"statistics": data, **former}

    def sent(self, agreement: bytes, digest: str | None = None) -> bytes:
        """The exact bytes that were sent, to leave with: those of this hash, or the last."""
        terms = self._in_the_clear(Terms.from_json(agreement))
        return self._kept(terms, digest or _last(self._sent(terms)))

    def _kept(self, terms: Terms, wanted: str) -> bytes:
        """A contribution as it was made."""
        path = self.home(terms) / f"sent-{wanted}.safetensors"
        if not path.is_file():
            raise InputError(f"{self.name} keeps no contribution {wanted[:12]} in {path.parent}")
        data = path.read_bytes()
        if sha256(data) != wanted:
            raise InputError(f"{path} has changed on disk; restore it from a backup, or leave and join anew")
        return data

    def table(self, agreement: bytes, publication: bytes) -> bytes:
        """How many left-out rows each setting gets right under this publication."""
        terms = self._in_the_clear(self._agreed(agreement))
        broadcast = open_publication(publication, terms)
        counted = self._left_out_hits(terms, broadcast)
        return seal_table(terms, self.name, broadcast.number, counted)

    # --------------------------------------------------------------------------------------- under masks

    def count(self, terms: Terms) -> np.ndarray:
        """Rows of each class that this client would contribute, and whether it has any, int64 (2 c,)."""
        rows = select(self.train, self.class_names, terms).only_shared()
        counts = torch.bincount(rows.labels, minlength=terms.n_classes)
        if not len(rows):
            raise self._nothing_to_contribute(terms)
        if not (self.home(terms) / "draft.json").is_file():
            self.write(terms, "draft.json", terms.to_json().encode())
        return torch.cat([counts, (counts > 0).long()]).numpy()

    def shared_features(self, terms: Terms) -> Tensor:
        """The rows that this client would contribute under a draft."""
        return select(self.train, self.class_names, terms).only_shared().features

    def own_moments(self, terms: Terms) -> tuple[Described, tuple[str, ...], Uniform]:
        """The moments of the rows that are contributed, what these do not bear, and the numbers that round them."""
        rows = self._contributed(terms)
        unsuited = tuple(how for how in CANDIDATES if not fits(how, [self.train.features]))
        return describe(rows.features), unsuited, self._dither(terms, "moments")

    def own_pilot(self, asked: Question) -> dict[str, np.ndarray] | None:
        """The statistics of the rows that take part in a pilot, for every candidate; None if no rows do."""
        rows = self._rows_of_pilot(asked)
        if not len(rows):
            return None
        data = seal_statistics(asked, rows, self.name, lambda how: self._dither(asked.terms, f"pilot {how}"))
        return dict(open_statistics(data, asked).integers)

    def own_pilot_table(self, asked: Question, told: Primaries) -> tuple[Tensor, int]:
        """Left-out hits of these rows, and how many rows can be left out."""
        rows = self._rows_of_pilot(asked)
        if not len(rows):
            return torch.zeros(asked.shape, dtype=torch.int64), 0
        n_copies = int(leaving(rows.features, rows.labels, None).copies.sum())
        return told.table(asked, rows), len(rows) - n_copies

    def secret(self, terms: Terms, purpose: str) -> bytes:
        """A secret of this client's own for one purpose and one cohort; it never leaves this disk."""
        return hashlib.sha256(f"{self._own_seed(terms)} {self._under(terms)} {purpose}".encode()).digest()

    def keep_counts(self, terms: Terms, counts: Counts) -> None:
        """Keep what the cohort has together: classes that too few hold stay out of every sum."""
        if self._counts(terms) != counts:
            self.write(terms, "counts.json", counts.to_bytes())

    def note_membership(self, terms: Terms, token: str) -> None:
        """From now on a publication that names this token has this client's rows in it."""
        sent = self._sent(terms)
        if token not in sent:
            sent[token] = {**sent[_last(sent)], "masked": True}
            self.write(terms, "sent.json", json.dumps(sent, sort_keys=True).encode())

    def left_out(self, terms: Terms, number: int, publication: bytes) -> tuple[Tensor, int]:
        """The table of left-out hits under the publication with this number, and of how many rows it is."""
        broadcast = open_publication(publication, terms)
        if broadcast.number != number:
            raise InputError(f"publication {broadcast.number} given for the tables of publication {number}")
        return self._left_out_hits(terms, broadcast), len(self._contributed(terms))

    def _counts(self, terms: Terms) -> Counts | None:
        path = self.home(terms) / "counts.json"
        return Counts.from_bytes(path.read_bytes()) if terms.masked and path.is_file() else None

    def _under(self, terms: Terms) -> str:
        """The digest of the terms, and under masks of the counts, which decide the classes in a sum."""
        counts = self._counts(terms)
        return terms.digest if counts is None else sha256((terms.digest + counts.digest).encode())

    def _in_the_clear(self, terms: Terms) -> Terms:
        """The terms, unless they are masked: then nothing leaves this client by itself."""
        if terms.masked:
            raise InputError(
                "a message of this site alone was asked for, and the terms are masked: only sums over several sites "
                "may be known. Nothing was sent"
            )
        return terms

    # ----------------------------------------------------------------------------------- what stays here

    def refine(self, agreement: bytes, publication: bytes, choice: bytes | None = None) -> Path:
        """Fit the personal model to a publication and write it; it takes the place of an earlier one.

        If the primary is not clearly better on the client's own left-out rows than going without it, the client says
        so and goes without it.
        """
        terms = self._agreed(agreement)
        broadcast = open_publication(publication, terms)
        plan = self._plan(terms, broadcast, choice)
        member = self._is_member(terms, broadcast)
        landmarks, scaling = self.agreed_landmarks(terms), self._scaling(terms)
        fitted = personal_model(self._usable(terms), terms, landmarks, broadcast, member, plan, scaling)
        container = fitted.model.container()
        container.settings.update(publication=broadcast.number, about=self.about, **_account(fitted))
        if broadcast.account is not None:
            container.settings.update(privacy=dict(broadcast.account))
        if fitted.alone:
            log.warning(_warning(fitted.comparison, broadcast.number))
        elif fitted.weight != plan.weight:
            log.warning(
                f"note: with weight {fitted.weight:g} on the primary of publication {broadcast.number} clearly more of "
                f"this site's left-out rows are right than with {plan.weight:g}, which the others chose; its model has "
                "that weight"
            )
        return self._write_model(container, terms)

    def _write_model(self, container: Container, terms: Terms) -> Path:
        path = self.model_path(terms)
        write(container, path)
        make_private(path)
        return path

    def evaluate(self, agreement: bytes) -> dict[str, Any]:
        """Accuracy of the personal model on the client's own test rows; stays here."""
        if self.test is None or not len(self.test):
            raise InputError(f"{self.name} has no test rows; keep some with a test column or a test fraction")
        names = [self.class_names[i] for i in self.test.labels.tolist()]
        predicted = self.predict(agreement, self.test.features)
        right = sum(a == b for a, b in zip(predicted, names, strict=True))
        number = self.publication(Terms.from_json(agreement))
        return {"accuracy": right / len(names), "n_test": len(names), "publication": number}

    def metrics(self, agreement: bytes) -> bytes:
        """`evaluate` as a message, for a client that chooses to report it."""
        told = self.evaluate(agreement)
        terms = self._in_the_clear(Terms.from_json(agreement))
        if terms.private:
            raise InputError("an accuracy would tell of rows without noise; under epsilon none is reported")
        return seal_metrics(terms, self.name, told["publication"], told["accuracy"], told["n_test"])

    def predict(self, agreement: bytes, features: Tensor) -> list[str | None]:
        """Class names by the personal model, offline; None, with a warning, for rows without a decision."""
        terms = Terms.from_json(agreement)
        path = self.model_path(terms)
        if not path.is_file():
            raise InputError(f"{self.name} has no model yet in {path.parent}; it comes with the first publication")
        model, names = load_model(path), terms.class_names or ()
        scores = model.scores(features)
        reasons = undecided(model, features, scores)
        if bool(reasons.any()):
            warnings.warn(f"{in_words(reasons)}; these are left empty", stacklevel=2)
        best = zip(scores.argmax(1).tolist(), reasons.tolist(), strict=True)
        return [None if reason else names[i] for i, reason in best]

    def publication(self, terms: Terms) -> int | None:
        """The publication that the personal model was fitted to; None before the first."""
        path = self.model_path(terms)
        return int(read(path).settings["publication"]) if path.is_file() else None

    def home(self, terms: Terms) -> Path:
        """Where this client keeps what belongs to this federation."""
        return self.folder / terms.federation / self.name

    def model_path(self, terms: Terms) -> Path:
        """Where the personal model is."""
        return self.home(terms) / "model.safetensors"

    # --------------------------------------------------------------------------------------------- within

    def _usable(self, terms: Terms) -> Shard:
        rows, counts = select(self.train, self.class_names, terms), self._counts(terms)
        return rows if counts is None else without_classes(rows, counts.admitted)

    def _contributed(self, terms: Terms) -> Shard:
        rows = self._usable(terms).only_shared()
        if not len(rows):
            raise self._nothing_to_contribute(terms)
        return rows

    def _nothing_to_contribute(self, terms: Terms) -> InputError:
        if terms.private:
            return InputError(
                f"{self.name} has no rows of the agreed classes, or more than {terms.max_rows}. Under epsilon a site "
                "contributes all its rows or none: if some were drawn, one row more would exchange others. Take part "
                "with fewer rows"
            )
        withheld = ", or is held by too few sites" if self._counts(terms) is not None else ""
        return InputError(
            f"nothing to contribute: every class of {self.name} has fewer than {terms.min_per_class} rows{withheld}"
        )

    def _agreed(self, agreement: bytes) -> Terms:
        """The terms, which must be what the invitation that was answered said, with the open parts filled in."""
        terms = Terms.from_json(agreement)
        if not terms.settled:
            raise InputError("these terms are a draft; wait for the settled ones")
        return self.unchanged(terms)

    def unchanged(self, terms: Terms) -> Terms:
        """The terms, unless they say otherwise than the draft that was answered."""
        draft = self.home(terms) / "draft.json"
        changed = terms.departs_from(Terms.from_json(draft.read_bytes())) if draft.is_file() else None
        if changed:
            raise InputError(
                f"the server now says otherwise than in its invitation: {changed} has changed; nothing was sent. "
                f"If you agree, remove {draft} and join again"
            )
        return terms

    def _plan(self, terms: Terms, broadcast: Broadcast, choice: bytes | None) -> Plan:
        """beta, balance, tau and the weight on the primary: agreed, or chosen by everyone's tables or the client's."""
        if not terms.choice.open:
            return terms.fixed_plan(broadcast.unit)
        if terms.choice.scope == "client":
            tables, rule = terms.by_weight(self._left_out_hits(terms, broadcast)), rule_of(terms.choice.cautious)
            return plan_of(tables, terms.grid(broadcast.unit), len(self._usable(terms)), choice=rule)
        if choice is None:
            raise InputError("these terms choose beta, balance and tau from everyone's tables: give the choice too")
        chosen = open_choice(choice, terms)
        if chosen.number != broadcast.number:
            raise InputError(f"a choice for publication {chosen.number} given with publication {broadcast.number}")
        return chosen.plan

    def _left_out_hits(self, terms: Terms, broadcast: Broadcast) -> Tensor:
        member, landmarks = self._is_member(terms, broadcast), self.agreed_landmarks(terms)
        return left_out_hits(self._usable(terms), terms, landmarks, broadcast, member)

    def agreed_landmarks(self, terms: Terms) -> Landmarks | None:
        """The landmarks that the terms name, as they were kept here; none under a random map."""
        if not terms.landmarked:
            return None
        wanted = terms.landmarks_sha256 or ""
        if wanted not in self._landmarks:
            path = self.home(terms) / _landmarks_file(terms)
            if not path.is_file():
                raise InputError(f"{self.name} has no landmarks in {path.parent}; the server must send them again")
            self._landmarks[wanted] = open_landmarks(path.read_bytes(), terms)
        return self._landmarks[wanted]

    def _dither(self, terms: Terms, purpose: str) -> Uniform:
        """The random numbers that round one message: from a seed that never leaves this disk."""
        return dither(self._own_seed(terms), purpose, torch.device("cpu"))

    def _own_seed(self, terms: Terms) -> int:
        """Of what this client draws under these terms, the same with masks and without; it never leaves this disk."""
        if self.rounding_seed is not None:
            return self.rounding_seed
        path = self.home(terms) / "rounding.seed"
        if not path.is_file():
            self.write(terms, path.name, secrets.token_hex(32).encode())
        seed = sha256(path.read_bytes() + terms.digest_but_masks.encode() + self._fingerprint.encode())
        return int(seed, 16)

    def _scaling(self, terms: Terms) -> str:
        """The normalisation of the invitation, before anyone's moments settled it."""
        draft = self.home(terms) / "draft.json"
        return (Terms.from_json(draft.read_bytes()) if draft.is_file() else terms).method.normalise

    def _is_member(self, terms: Terms, broadcast: OfMembers) -> bool:
        """Whether these very rows are in the publication."""
        published = (told for digest, told in self._sent(terms).items() if digest in broadcast.members)
        return any(self._difference(terms, told) is None for told in published)

    def _difference(self, terms: Terms, told: dict[str, Any]) -> str | None:
        """How the rows differ from those that an entry of ``sent.json`` remembers."""
        if told["data"] == self._fingerprint:
            return None
        return difference(told, self._remembered(terms))

    def _remembered(self, terms: Terms) -> dict[str, Any]:
        """What is remembered of the rows that are contributed."""
        return remembered(self._usable(terms).only_shared(), terms.class_names or ())

    @cached_property
    def _fingerprint(self) -> str:
        """SHA-256 over the rows."""
        digest = hashlib.sha256(json.dumps([self.class_names, str(self.train.features.dtype)]).encode())
        for tensor in (self.train.features, self.train.labels):
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def _sent(self, terms: Terms) -> dict[str, dict[str, Any]]:
        """Hash of what was sent -> of which rows, under which terms."""
        path = self.home(terms) / "sent.json"
        try:
            kept: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
        except (OSError, ValueError) as error:
            raise InputError(f"{path} cannot be read ({error}); restore it, or remove it and join anew") from error
        return kept

    def write(self, terms: Terms, name: str, data: bytes) -> None:
        home = self.home(terms)
        with replacing(home / name) as temporary:
            with suppress(OSError):  # it may be another's, who lets us write
                home.chmod(0o700)
            temporary.write_bytes(data)
            make_private(temporary)


def _landmarks_file(terms: Terms) -> str:
    return f"landmarks-{(terms.landmarks_sha256 or '')[:32]}.safetensors"


def _last(sent: dict[str, dict[str, Any]]) -> str:
    """The hash of what was sent last; empty if nothing was."""
    return max(sent, key=lambda each: sent[each]["order"], default="")


def _account(fitted: Fitted) -> dict[str, Any]:
    """What the model file says about going alone."""
    told = fitted.comparison
    left_out = {
        "rows": told.n_rows, "unjudged": told.n_unjudged, "right_together": told.together, "right_alone": told.alone
    }  # fmt: skip
    return {"alone": fitted.alone, "weight": fitted.weight, "left_out": left_out}


def _warning(comparison: Comparison, number: int) -> str:
    unjudged = f" ({comparison.n_unjudged} more cannot be judged)" if comparison.n_unjudged else ""
    clear = "" if comparison.together < comparison.alone else ", because that is no clear gain"
    return (
        f"warning: with the primary of publication {number}, {comparison.together} of this site's "
        f"{comparison.n_rows} left-out rows are right{unjudged}; without it, {comparison.alone}. The site's model was "
        f"fitted without it{clear}. Either its rows are unlike the others', or they are enough by themselves, or "
        "another site sent wrong ones: ask whoever runs the server"
    )
