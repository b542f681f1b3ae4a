"""The client's side of a federation. Its rows stay on its disk, and so does its model.

All state is in files under FOLDER/FEDERATION/NAME, since each message may be handled by a process of its own: the draft
that was agreed to, what was sent (it may be asked for again when the client leaves), and the personal model.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import warnings
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apfl.data import load_dataset
from apfl.data.federation import Shard
from apfl.data.protocol import Protocol, halving, sharding
from apfl.errors import InputError
from apfl.federate.contribution import Repeats, encode
from apfl.federate.disclosure import Usable, WhatLeaves, names_under, select, what_leaves
from apfl.federate.fitting import left_out_hits, personal_model
from apfl.federate.messages import Broadcast, open_choice, open_publication, seal_description, seal_metrics, seal_table
from apfl.federate.terms import Description, Terms, check_name
from apfl.federate.wire import sha256
from apfl.files import replacing
from apfl.maths.hits import choose
from apfl.maths.leaveout import echo, leaving
from apfl.maths.normalise import moments, needs_moments
from apfl.models.dual_stream import DualStream
from apfl.models.file import read, write
from apfl.models.undecided import in_words, undecided

__all__ = ["Site"]


class Site:
    """One client: ``train`` with labels that index ``class_names``, and test rows if it has any.

    ``agreement`` is always the bytes of the settled terms, as `Coordinator.settle` gives them.
    """

    def __init__(
        self, folder: str | Path, name: str, train: Shard, class_names: tuple[str, ...], test: Shard | None = None
    ) -> None:
        self.folder, self.name = Path(folder), check_name("client", name)
        self.train, self.class_names, self.test = train, class_names, test

    @classmethod
    def from_file(
        cls,
        folder: str | Path,
        name: str,
        data: str,
        *,
        test_fraction: float = 0.0,
        test_column: str | None = None,
        group_column: str | None = None,
        seed: int = 0,
    ) -> Site:
        """A client whose features are in a file; some rows may be kept for testing, by column or by share."""
        dataset = load_dataset(data)
        protocol = Protocol(test_fraction=test_fraction, test_column=test_column, group_column=group_column)
        rows, rng = np.arange(len(dataset.labels)), np.random.default_rng(seed)
        train, test = map(sharding(dataset, protocol), halving(dataset, protocol)(rows, rng))
        return cls(folder, name, train, dataset.class_names, test if len(test) else None)

    # ---------------------------------------------------------------------------------------- what leaves

    def what_leaves(self, agreement: bytes) -> WhatLeaves:
        """What this client would send under these terms, or under an invitation to them."""
        return what_leaves(self.train, self.class_names, Terms.from_json(agreement))

    def describe(self, invitation: bytes) -> bytes:
        """The first message: n, feature width, class names; moments too if the normalisation needs them."""
        draft = Terms.from_json(invitation)
        rows = self._contributed(draft)
        names = names_under(self.class_names, draft)
        present = tuple(names[i] for i in torch.unique(rows.labels).tolist())
        own = moments(rows.features) if needs_moments(draft.method.normalise) else None
        self._write(draft, "draft.json", draft.to_json().encode())
        described = Description(self.name, len(rows), self.train.features.shape[1], present, own)
        return seal_description(described, draft)

    def statistics(self, agreement: bytes, *, again: bool = False) -> bytes:
        """The contribution: made once, kept, and the same when asked for twice.

        Terms that are not those this client was invited to are refused. ``again`` makes a new contribution, for a
        client that left and comes back.
        """
        terms = self._agreed(agreement)
        sent = self._sent(terms)
        if not again:
            for digest, told in sent.items():
                if (told["data"], told["terms"]) == (self._fingerprint, terms.digest):
                    return self.sent(agreement, digest)
        rows = self._contributed(terms)
        phi = terms.maps(rows.features)[0](terms.normaliser()(rows.features))
        copies = leaving(rows.features, rows.labels, None).copies
        repeats = Repeats(int(copies.sum()), echo(rows.features))
        data = encode(phi, rows.labels, terms, self.name, secrets.token_hex(8) if again else "", repeats)
        digest = sha256(data)
        self._write(terms, f"sent-{digest}.safetensors", data)
        sent[digest] = {"data": self._fingerprint, "terms": terms.digest, "order": len(sent)}
        self._write(terms, "sent.json", json.dumps(sent, sort_keys=True).encode())
        return data

    def sent(self, agreement: bytes, digest: str | None = None) -> bytes:
        """The exact bytes that were sent, to leave with: those of this hash, or the last."""
        terms = Terms.from_json(agreement)
        known = self._sent(terms)
        wanted = digest or max(known, key=lambda each: known[each]["order"], default="")
        path = self.home(terms) / f"sent-{wanted}.safetensors"
        if not path.is_file():
            raise InputError(f"{self.name} keeps no contribution {wanted[:12]} in {path.parent}")
        return path.read_bytes()

    def table(self, agreement: bytes, publication: bytes) -> bytes:
        """How many left-out rows each setting gets right under this publication."""
        terms = self._agreed(agreement)
        broadcast = open_publication(publication, terms)
        counted = left_out_hits(self._usable(terms), terms, broadcast, self._is_member(terms, broadcast))
        return seal_table(terms, self.name, broadcast.number, counted)

    # ----------------------------------------------------------------------------------- what stays here

    def refine(self, agreement: bytes, publication: bytes, choice: bytes | None = None) -> Path:
        """Fit the personal model to a publication and write it; it takes the place of an earlier one."""
        terms = self._agreed(agreement)
        broadcast = open_publication(publication, terms)
        setting = self._setting(terms, broadcast, choice)
        member = self._is_member(terms, broadcast)
        model = personal_model(self._usable(terms), terms, broadcast, member, setting)
        container = model.container()
        container.settings["publication"] = broadcast.number
        path = self.model_path(terms)
        write(container, path)
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
        terms = Terms.from_json(agreement)
        return seal_metrics(terms, self.name, told["publication"], told["accuracy"], told["n_test"])

    def predict(self, agreement: bytes, features: Tensor) -> list[str | None]:
        """Class names by the personal model, offline; None, with a warning, for rows without a decision."""
        terms = Terms.from_json(agreement)
        path = self.model_path(terms)
        if not path.is_file():
            raise InputError(f"{self.name} has no model yet in {path.parent}; it comes with the first publication")
        model, names = DualStream.load(path), terms.class_names or ()
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

    def _usable(self, terms: Terms) -> Usable:
        return select(self.train, self.class_names, terms)

    def _contributed(self, terms: Terms) -> Shard:
        rows = self._usable(terms).only_shared().rows
        if not len(rows):
            raise InputError(
                f"nothing to contribute: every class of {self.name} has fewer than {terms.min_per_class} rows"
            )
        return rows

    def _agreed(self, agreement: bytes) -> Terms:
        """The terms, which must be what the invitation that was answered said, with the open parts filled in."""
        terms = Terms.from_json(agreement)
        if not terms.settled:
            raise InputError("these terms are a draft; wait for the settled ones")
        draft = self.home(terms) / "draft.json"
        changed = terms.departs_from(Terms.from_json(draft.read_bytes())) if draft.is_file() else None
        if changed:
            raise InputError(
                f"the server now says otherwise than in its invitation: {changed} has changed; nothing was sent. "
                f"If you agree, remove {draft} and join again"
            )
        return terms

    def _setting(self, terms: Terms, broadcast: Broadcast, choice: bytes | None) -> tuple[float, float, float]:
        """beta, balance and tau: agreed, chosen by everyone's tables, or by the client's own."""
        tried = terms.grid(broadcast.unit)
        if not terms.choice.open:
            return tried.betas[0], tried.balances[0], tried.taus[0]
        if terms.method.scope == "client":
            own = left_out_hits(self._usable(terms), terms, broadcast, self._is_member(terms, broadcast))
            return choose(own, tried)
        if choice is None:
            raise InputError("these terms choose beta, balance and tau from everyone's tables: give the choice too")
        chosen = open_choice(choice, terms)
        if chosen.number != broadcast.number:
            raise InputError(f"a choice for publication {chosen.number} given with publication {broadcast.number}")
        return chosen.setting

    def _is_member(self, terms: Terms, broadcast: Broadcast) -> bool:
        """Whether these very rows are in the publication."""
        sent = self._sent(terms)
        return any(told["data"] == self._fingerprint for digest, told in sent.items() if digest in broadcast.members)

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

    def _write(self, terms: Terms, name: str, data: bytes) -> None:
        with replacing(self.home(terms) / name) as temporary:
            temporary.write_bytes(data)
