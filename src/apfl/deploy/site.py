"""The client's side of a federation. Its rows stay on its disk, and so does its model.

All state is in files under FOLDER/FEDERATION/NAME, since each message may be handled by a process of its own:
the terms, what was sent (it may be asked for again when the client leaves), and the personal model.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apfl.container import replacing, write
from apfl.data import load_dataset
from apfl.deploy.contribution import encode
from apfl.deploy.messages import (
    Broadcast,
    open_choice,
    open_publication,
    seal_description,
    seal_metrics,
    seal_table,
)
from apfl.deploy.terms import Description, Terms, check_name
from apfl.deploy.wire import sha256
from apfl.errors import InputError
from apfl.exchange import unpack
from apfl.federation import Shard
from apfl.leaveout import HatBasis, LeftOut, hat_basis, whiten
from apfl.normalise import moments
from apfl.partition import split
from apfl.ridge import one_hot
from apfl.streams import DualStream, fit_refinement
from apfl.tables import choose, hits, local_prior, towards_the_sum

__all__ = ["Site", "WhatLeaves"]


@dataclass(frozen=True)
class WhatLeaves:
    """What a client sends, in numbers; `lines` says it in words."""

    n_samples: int  # rows behind the statistics
    counts: dict[str, int]  # rows of each class behind them
    withheld: dict[str, int]  # classes whose rows stay out of them, because they are too few
    unknown: dict[str, int]  # classes that the federation does not have
    n_features: int
    width: int | None  # None while the terms are not settled
    numbers: int | None  # in the statistics
    n_bytes: int | None
    table: int  # integers in the table of left-out hits
    moments: bool
    keeps: bool  # whether the server keeps the contribution by itself

    def lines(self) -> list[str]:
        """In words, one statement a line."""
        size = "" if self.numbers is None else f": {self.numbers:,} numbers, {(self.n_bytes or 0) / 1e6:.1f} MB"
        told = [
            f"first: the number of rows ({self.n_samples:,}), the feature width ({self.n_features}), and the names of "
            f"{len(self.counts)} classes: {', '.join(self.counts)}",
            f"then, once: sums of products of the activated features of these rows, and their sums by class{size}",
            f"with it, how many rows each class has: {', '.join(f'{k} {v}' for k, v in self.counts.items())}",
        ]
        if self.moments:
            told.insert(1, f"sum and sum of squares of each of the {self.n_features} features")
        if self.table:
            told.append(f"later: {self.table:,} counts of left-out rows predicted right, one for each setting tried")
        told.append(
            "the server keeps the sums of this client" if self.keeps else "the server keeps only everyone's sum"
        )
        for name, n in self.withheld.items():
            told.append(f"withheld: class {name}, {n} rows; so few could be read off the sums")
        for name, n in self.unknown.items():
            told.append(f"not used: class {name}, {n} rows; the federation does not have it")
        return [*told, "never: rows, images, labels of single rows, the personal model; metrics only if asked to"]


@dataclass(frozen=True, eq=False)
class _Rows:
    """The client's rows as the terms see them: labels in the federation's order."""

    features: Tensor
    labels: Tensor
    groups: Tensor | None
    shared: Tensor  # (n,), bool: rows that are behind the statistics

    def only_shared(self) -> _Rows:
        groups = None if self.groups is None else self.groups[self.shared]
        return _Rows(self.features[self.shared], self.labels[self.shared], groups, self.shared[self.shared])


class Site:
    """One client: ``train`` with labels that index ``class_names``, and test rows if it has any."""

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
        rows = np.arange(len(dataset.labels))
        codes = None if group_column is None else np.unique(dataset.column(group_column), return_inverse=True)[1]
        if test_column is not None:
            chosen = np.isin(dataset.column(test_column), (1, True, "test"))
            fit, held = rows[~chosen], rows[chosen]
        else:
            fit, held = split(rows, np.random.default_rng(seed), test_fraction=test_fraction, groups=codes)
        groups = None if codes is None else torch.from_numpy(codes)

        def shard(some: np.ndarray) -> Shard:
            own = torch.from_numpy(some)
            return Shard(dataset.features[own], dataset.labels[own], None if groups is None else groups[own])

        return cls(folder, name, shard(fit), dataset.class_names, shard(held) if len(held) else None)

    # ---------------------------------------------------------------------------------------- what leaves

    def describe(self, invitation: bytes) -> bytes:
        """The first message: n, feature width, class names; moments too if features are standardised."""
        draft = Terms.from_json(invitation)
        rows, names = self._rows(draft)
        shared = rows.only_shared()
        if not len(shared.labels):
            raise InputError(
                f"nothing to contribute: every class of {self.name} has fewer than {draft.min_per_class} rows"
            )
        present = tuple(names[i] for i in torch.unique(shared.labels).tolist())
        own = moments(shared.features) if draft.method.normalise == "standardise" else None
        return seal_description(
            Description(self.name, len(shared.labels), self.train.features.shape[1], present, own), draft
        )

    def statistics(self, agreement: bytes, *, again: bool = False) -> bytes:
        """The contribution: made once, kept, and the same when asked for twice.

        ``again`` makes a new one, for a client that left and comes back.
        """
        terms = Terms.from_json(agreement)
        state = self._state(terms)
        known = {} if again else {told["data"]: digest for digest, told in state["sent"].items()}
        if self._fingerprint in known:
            return self.sent(agreement, known[self._fingerprint])
        rows = self._rows(terms)[0].only_shared()
        if not len(rows.labels):
            raise InputError(f"nothing to contribute: every class of {self.name} has too few rows")
        phi = terms.maps(rows.features)[0](terms.normaliser()(rows.features))
        data = encode(phi, rows.labels, terms, self.name, secrets.token_hex(8) if again else "")
        digest = sha256(data)
        home = self.home(terms)
        with replacing(home / "terms.json") as temporary:
            temporary.write_text(terms.to_json())
        with replacing(home / f"sent-{digest}.safetensors") as temporary:
            temporary.write_bytes(data)
        state["sent"][digest] = {"data": self._fingerprint, "order": len(state["sent"])}
        self._keep(terms, state)
        return data

    def what_leaves(self, agreement: bytes) -> WhatLeaves:
        """What this client would send under these terms, or under a draft of them."""
        terms = Terms.from_json(agreement)
        rows, names = self._rows(terms)
        counts = torch.bincount(rows.labels, minlength=len(names)).tolist()
        own = torch.bincount(self.train.labels, minlength=len(self.class_names)).tolist()
        shared = {name: n for name, n in zip(names, counts, strict=True) if n >= terms.min_per_class}
        withheld = {name: n for name, n in zip(names, counts, strict=True) if 0 < n < terms.min_per_class}
        strange = {name: n for name, n in zip(self.class_names, own, strict=True) if n and name not in names}
        n, numbers = sum(shared.values()), None
        if terms.settled:
            d, r = terms.width, min(n, terms.width)
            numbers = (r * d - r * (r - 1) // 2) + r * terms.n_classes  # r = d gives the triangle
        return WhatLeaves(
            n, shared, withheld, strange, self.train.features.shape[1], terms.width if terms.settled else None, numbers,
            None if numbers is None else numbers * terms.dtype.itemsize,
            int(np.prod(terms.grid(1.0).shape)) if terms.wants_tables else 0,
            terms.method.normalise == "standardise", terms.keep_contributions,
        )  # fmt: skip

    def sent(self, agreement: bytes, digest: str | None = None) -> bytes:
        """The exact bytes that were sent, to leave with: those of this hash, or the last."""
        terms = Terms.from_json(agreement)
        known = self._state(terms)["sent"]
        wanted = digest or max(known, key=lambda each: known[each]["order"], default="")
        path = self.home(terms) / f"sent-{wanted}.safetensors"
        if not path.is_file():
            raise InputError(f"{self.name} has no contribution {wanted[:12]} in {path.parent}")
        return path.read_bytes()

    # ----------------------------------------------------------------------------------- what stays here

    def table(self, agreement: bytes, publication: bytes) -> bytes:
        """How many left-out rows each setting gets right under this publication."""
        terms = Terms.from_json(agreement)
        broadcast = open_publication(publication, terms)
        return seal_table(terms, self.name, broadcast.number, self._hits(terms, broadcast))

    def refine(self, agreement: bytes, publication: bytes, choice: bytes | None = None) -> Path:
        """Fit the personal model to a publication and write it; it takes the place of an earlier one."""
        terms = Terms.from_json(agreement)
        broadcast = open_publication(publication, terms)
        beta, balance, tau = self._setting(terms, broadcast, choice)
        rows = self._rows(terms)[0]
        maps = terms.maps(rows.features)
        targets = one_hot(rows.labels, terms.n_classes)
        phi, psi = (each(terms.normaliser()(rows.features)) for each in maps)
        residual = targets - phi.to(torch.float64) @ broadcast.weights
        inside = rows.shared & self._is_member(terms, broadcast)
        if terms.wants_leverage:
            none = HatBasis(residual[:, :0], residual[0, :0])  # the target does not depend on the refinement's own
            whitened = _whitened(phi, broadcast, terms, inside)
            residual = LeftOut(none, whitened, residual, terms.method.refinement, rows.groups).target
        refinement = fit_refinement(psi, residual, beta)
        prior = None
        if tau:
            everyone = broadcast.class_counts + targets[~inside].sum(0)
            prior = tau * local_prior(targets.sum(0), everyone, terms.method.smoothing)
        model = DualStream(
            maps[0], broadcast.weights, maps[1], refinement, balance, terms.normaliser(), terms.class_names, prior=prior
        )
        path = self.home(terms) / "model.safetensors"
        write(model.container(), path)
        self._keep(terms, self._state(terms) | {"publication": broadcast.number})
        return path

    def evaluate(self, agreement: bytes) -> dict[str, Any]:
        """Accuracy of the personal model on the client's own test rows; stays here."""
        terms = Terms.from_json(agreement)
        if self.test is None or not len(self.test):
            raise InputError(f"{self.name} has no test rows; keep some with a test column or a test fraction")
        names = [self.class_names[i] for i in self.test.labels.tolist()]
        right = sum(a == b for a, b in zip(self.predict(agreement, self.test.features), names, strict=True))
        number = self._state(terms).get("publication", 0)
        return {"accuracy": right / len(names), "n_test": len(names), "publication": number}

    def metrics(self, agreement: bytes) -> bytes:
        """`evaluate` as a message, for a client that chooses to report it."""
        told = self.evaluate(agreement)
        terms = Terms.from_json(agreement)
        return seal_metrics(terms, self.name, told["publication"], told["accuracy"], told["n_test"])

    def predict(self, agreement: bytes, features: Tensor) -> list[str]:
        """Class names by the personal model, offline."""
        terms = Terms.from_json(agreement)
        path = self.home(terms) / "model.safetensors"
        if not path.is_file():
            raise InputError(f"{self.name} has no model yet in {path.parent}; it comes with the first publication")
        return [(terms.class_names or ())[i] for i in DualStream.load(path).predict(features).tolist()]

    def home(self, terms: Terms) -> Path:
        """Where this client keeps what belongs to this federation."""
        return self.folder / terms.federation / self.name

    # --------------------------------------------------------------------------------------------- within

    def _rows(self, terms: Terms) -> tuple[_Rows, tuple[str, ...]]:
        """Rows of classes the federation has, and the names that their labels index."""
        if terms.n_features is not None and self.train.features.shape[1] != terms.n_features:
            raise InputError(
                f"features of width {self.train.features.shape[1]} at {self.name}; the federation agreed on "
                f"{terms.n_features}: use the same backbone"
            )
        names = self.class_names if terms.class_names is None else terms.class_names
        index = torch.tensor([names.index(name) if name in names else -1 for name in self.class_names])
        labels = index[self.train.labels]
        known = labels >= 0
        if not bool(known.any()):
            raise InputError(f"no row of {self.name} is of a class that the federation has ({', '.join(names[:8])})")
        labels = labels[known]
        enough = torch.bincount(labels, minlength=len(names)) >= terms.min_per_class
        groups = None if self.train.groups is None else self.train.groups[known]
        return _Rows(self.train.features[known], labels, groups, enough[labels]), names

    def _hits(self, terms: Terms, broadcast: Broadcast) -> Tensor:
        """Left-out hits of the rows behind the statistics."""
        rows = self._rows(terms)[0].only_shared()
        z = terms.normaliser()(rows.features)
        phi, psi = (each(z) for each in terms.maps(rows.features))
        targets = one_hot(rows.labels, terms.n_classes)
        inside = torch.full_like(rows.shared, self._is_member(terms, broadcast))
        left = LeftOut(
            hat_basis(psi), _whitened(phi, broadcast, terms, inside),
            targets - phi.to(torch.float64) @ broadcast.weights, terms.method.refinement, rows.groups,
        )  # fmt: skip
        everyone = broadcast.class_counts + targets[~inside].sum(0)
        tried = terms.grid(broadcast.unit)
        return hits(left, rows.labels, targets.sum(0), everyone, terms.method.smoothing, tried)

    def _setting(self, terms: Terms, broadcast: Broadcast, choice: bytes | None) -> tuple[float, float, float]:
        """beta, balance and tau: agreed, chosen by everyone's tables, or by the client's own."""
        tried = terms.grid(broadcast.unit)
        if not terms.choice.open:
            return tried.betas[0], tried.balances[0], tried.taus[0]
        if terms.method.scope == "client":
            return choose(self._hits(terms, broadcast), tried)
        if choice is None:
            raise InputError("these terms choose beta, balance and tau from everyone's tables: give the choice too")
        chosen = open_choice(choice, terms)
        if chosen.number != broadcast.number:
            raise InputError(f"a choice for publication {chosen.number} given with publication {broadcast.number}")
        if chosen.hits is None:
            return chosen.setting
        own = self._hits(terms, broadcast)
        n = int(self._rows(terms)[0].shared.sum())
        counted = sha256(seal_table(terms, self.name, broadcast.number, own)) in chosen.counted
        summed, n_all = (chosen.hits, chosen.n_samples) if counted else (chosen.hits + own, chosen.n_samples + n)
        return choose(towards_the_sum(own, summed, n, n_all), tried)

    def _is_member(self, terms: Terms, broadcast: Broadcast) -> bool:
        """Whether these very rows are in the publication."""
        sent = self._state(terms)["sent"]
        return any(told["data"] == self._fingerprint for digest, told in sent.items() if digest in broadcast.members)

    @cached_property
    def _fingerprint(self) -> str:
        """SHA-256 over the rows."""
        digest = hashlib.sha256(json.dumps([self.class_names, str(self.train.features.dtype)]).encode())
        for tensor in (self.train.features, self.train.labels):
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()

    def _state(self, terms: Terms) -> dict[str, Any]:
        path = self.home(terms) / "state.json"
        try:
            kept: dict[str, Any] = (
                json.loads(path.read_text()) if path.exists() else {"terms": terms.digest, "sent": {}}
            )
        except (OSError, ValueError) as error:
            raise InputError(f"{path} cannot be read ({error}); restore it, or remove it and join anew") from error
        return kept

    def _keep(self, terms: Terms, state: dict[str, Any]) -> None:
        with replacing(self.home(terms) / "state.json") as temporary:
            temporary.write_text(json.dumps(state, sort_keys=True))


def _whitened(phi: Tensor, broadcast: Broadcast, terms: Terms, inside: Tensor) -> Tensor:
    """V, so that V V' is the primary's hat matrix; rows that the primary has not seen have no leverage in it."""
    assert broadcast.leverage is not None
    if terms.method.sketch:
        whitened = phi.to(torch.float64) @ broadcast.leverage
    else:
        whitened = whiten(phi, torch.tril(unpack(broadcast.leverage)))
    return whitened * inside[:, None]
