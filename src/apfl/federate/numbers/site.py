"""A client whose targets are columns: its rows, its statistics, its tables, and its model, which stays with it."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apfl.data.federation import Shard
from apfl.errors import InputError, printable
from apfl.federate.contribution import encode_numbers
from apfl.federate.disclosure import WhatLeaves
from apfl.federate.landmarks import Landmarks
from apfl.federate.messages import seal_description
from apfl.federate.numbers.disclosure import what_leaves
from apfl.federate.numbers.messages import (
    Errors,
    Likelihoods,
    Published,
    Table,
    open_chosen,
    open_sum,
    seal_spread,
    seal_table,
)
from apfl.federate.numbers.shared import STAGES, Chosen, Shared, maps_of, scale_of, stages_of
from apfl.federate.site import Site
from apfl.federate.terms import Description, Terms
from apfl.federate.wire import sha256
from apfl.maths.landmarks import spread
from apfl.maths.normalise import Moments, check_features, described
from apfl.maths.regression import beta_evidence, drawn, left_out, open_weights, squared
from apfl.maths.ridge_cv import RIDGES
from apfl.methods._numbers import MAPS, NumberRows, labelled, models_alone, own_ridge, own_shares
from apfl.models.file import load_model

__all__ = ["NumberSite", "select_columns"]

log = logging.getLogger(__name__)


def select_columns(train: Shard, names: Sequence[str], terms: Terms) -> Shard:
    """A client's rows under these terms: targets in the agreed order, and which rows are shared."""
    if train.targets is None or train.target != terms.target:
        raise InputError(
            f"rows for {train.target} given; this federation's terms say {terms.target}. Give join --target "
            f"{terms.target}, with the columns {printable(', '.join(terms.class_names or ()))} as --label-column"
        )
    if terms.n_features is not None and train.features.shape[1] != terms.n_features:
        raise InputError(
            f"features of width {train.features.shape[1]} given; the federation agreed on {terms.n_features}: "
            "use the same features"
        )
    agreed = terms.class_names or ()
    if set(names) != set(agreed):
        raise InputError(
            f"target columns {printable(', '.join(names))} given; the terms have {printable(', '.join(agreed))}: name "
            "these with --label-column"
        )
    check_features("standardise", [train.features])
    if not bool(torch.isfinite(train.targets).all()):
        raise InputError("targets contain NaN or infinity; remove or repair these rows")
    targets = train.targets[:, [list(names).index(name) for name in agreed]]
    return replace(train, targets=targets, shared=_shared(len(train), terms))


def _shared(n: int, terms: Terms) -> Tensor:
    """Which rows the federation may have, bool (n,): no more than the cap, the same at every call."""
    shared = torch.ones(n, dtype=torch.bool)
    if terms.row_limit is not None and n > terms.row_limit:
        shared[torch.from_numpy(np.random.default_rng(terms.seed).permutation(n)[terms.row_limit :])] = False
    return shared


class NumberSite(Site):
    """One client; ``class_names`` are the names of the columns of its targets."""

    # ---------------------------------------------------------------------------------------- what leaves

    def what_leaves(self, agreement: bytes) -> WhatLeaves:
        """What this client would send under these terms, or under an invitation to them."""
        terms = Terms.from_json(agreement)
        return what_leaves(self._usable(terms), terms)

    def describe(self, invitation: bytes) -> bytes:
        """The first message: n, feature width, names of the targets; sums and squares of features and targets."""
        draft = Terms.from_json(invitation)
        rows = self._contributed(draft)
        self.write(draft, "draft.json", draft.to_json().encode())
        targets, none = rows.responses(0), torch.zeros(3, dtype=torch.float64)
        told = Moments(len(rows), targets.sum(0), targets.square().sum(0), none)
        names, width = tuple(draft.class_names or ()), self.train.features.shape[1]
        own = described("standardise", rows.features)
        return seal_description(Description(self.name, len(rows), width, names, own, targets=told), draft)

    def own_spread(self, terms: Terms) -> bytes:
        """The moments as a message: the same for the same rows."""
        rows = terms.normaliser()(self._contributed(terms).features.double())
        return seal_spread(spread(rows, full=terms.spread == "full"), terms, self.name)

    def _encoded(self, terms: Terms, nonce: str) -> bytes:
        rows = self._rows(self._contributed(terms), terms)
        phi = self._maps(terms)[-1](rows.features)
        return encode_numbers(phi, rows.targets, terms, self.name, nonce, int(rows.leaving.copies.sum()))

    def table(self, agreement: bytes, publication: bytes, chosen: bytes = b"") -> bytes:
        """The sums of the stage after what was ``chosen`` so far, under this publication."""
        terms = self._agreed(agreement)
        told = self._opened(publication, terms)
        done, made = self._chosen(chosen, terms, told) if chosen else ("", Chosen(({},) * len(MAPS)))
        stages = ("", *stages_of(terms))
        if done == stages[-1]:
            raise InputError("everything is chosen already; no table is needed")
        stage, after = stages[stages.index(done) + 1], sha256(chosen) if chosen else ""
        if not self._is_member(terms, told):
            raise InputError(f"{self.name} is not in publication {told.number}; only members' tables count")
        # Rows that the cap keeps out of the sums are not told of either.
        return seal_table(terms, self.name, told.number, stage, after, self._table(stage, terms, told.shared, made))

    def _table(self, stage: str, terms: Terms, shared: Shared, made: Chosen) -> Table:
        rows = self._rows(self._contributed(terms), terms)
        seen = torch.ones(len(rows.features), dtype=torch.bool)
        if stage == STAGES[0]:
            return _likelihoods(shared, rows, seen)
        models, alone = _left_out(shared, rows, seen, made)
        if stage == STAGES[1]:
            seed = (terms.seed, rows.key)
            return Errors(drawn(squared(models), seed), drawn(squared(alone), seed))
        mixed = torch.einsum("m,mnt->nt", self._own_shares(shared, models, made), models)
        scale = scale_of(terms)
        return labelled(scale.undo(rows.targets - mixed), scale.undo(rows.targets))

    @staticmethod
    def _own_shares(shared: Shared, models: Tensor, made: Chosen) -> Tensor:
        """Everyone's shares, or those of going alone."""
        everyone = torch.tensor(made.shares or (), dtype=torch.float64)
        return own_shares(models, everyone, models_alone(shared.settings(made), shared.asked.plain))

    # ----------------------------------------------------------------------------------- what stays here

    def refine(self, agreement: bytes, publication: bytes, choice: bytes | None = None) -> Path:
        """Fit the personal model to a publication and write it; it takes the place of an earlier one."""
        terms = self._agreed(agreement)
        told = self._opened(publication, terms)
        if choice is None:
            raise InputError("these terms choose the shares of the models from everyone's tables: give the choice too")
        stage, made = self._chosen(choice, terms, told)
        if stage != stages_of(terms)[-1]:
            raise InputError(f"a choice of {stage} alone given; wait for the whole of it")
        usable = self._usable(terms)
        rows, seen = self._rows(usable, terms), self._seen(usable, terms, told)
        shares = self._own_shares(told.shared, _left_out(told.shared, rows, seen, made)[0], made)
        alone = shares.tolist() != list(made.shares or ())
        own = NumberRows(usable.features, usable.responses(0), usable.groups)
        model = told.shared.blend(made).model(own, shares)
        container = model.container()
        container.settings.update(
            class_names=list(terms.class_names or ()), about={**self.about, "target": terms.target},
            publication=told.number, alone=alone, shares=shares.tolist(),
        )  # fmt: skip
        if alone:
            log.warning(
                f"warning: with publication {told.number} this site's left-out rows are clearly worse predicted than "
                "by its own ridge alone, so its model was fitted without the others"
            )
        return self._write_model(container, terms)

    def scores(self, agreement: bytes, features: Tensor) -> Tensor:
        """Numbers, or scores of labels, of some rows by the personal model, (n, t): offline."""
        path = self.model_path(Terms.from_json(agreement))
        if not path.is_file():
            raise InputError(f"{self.name} has no model yet in {path.parent}; it comes with the first publication")
        return load_model(path).scores(features)

    def predict(self, agreement: bytes, features: Tensor) -> list[str | None]:
        """Rows of numbers have no class."""
        raise InputError(f"{self.name} predicts columns, not classes: use `apfl predict MODEL FILE`, or scores()")

    def evaluate(self, agreement: bytes) -> dict[str, Any]:
        """Root mean squared error of each column, or share of right labels, on the client's test rows; stays here."""
        if self.test is None or self.test.targets is None or not len(self.test):
            raise InputError(f"{self.name} has no test rows; keep some with a test column or a test fraction")
        terms = Terms.from_json(agreement)
        test = select_columns(self.test, self.class_names, terms)
        scores, targets = self.scores(agreement, test.features), test.responses(0)
        told = {"n_test": len(test), "publication": self.publication(terms)}
        if terms.target == "multilabel":
            right = ((scores > 0.5) == (targets > 0.5)).double().mean(0)
            return {"accuracy_of_label": dict(zip(terms.class_names or (), right.tolist(), strict=True)), **told}
        errors = (scores - targets).square().mean(0).sqrt()
        return {"rmse": dict(zip(terms.class_names or (), errors.tolist(), strict=True)), **told}

    def metrics(self, agreement: bytes) -> bytes:
        """An accuracy is all that a server takes."""
        raise InputError("numbers and labels have no accuracy to report: evaluate at the site; nothing was sent")

    # --------------------------------------------------------------------------------------------- within

    def _usable(self, terms: Terms) -> Shard:
        return select_columns(self.train, self.class_names, terms)

    def _rows(self, shard: Shard, terms: Terms) -> NumberRows:
        """With targets to the agreed scale."""
        return NumberRows(shard.features, scale_of(terms).apply(shard.responses(0)), shard.groups)

    def _maps(self, terms: Terms) -> list[Any]:
        return maps_of(terms, self._own_landmarks(terms))

    def _own_landmarks(self, terms: Terms) -> Landmarks:
        found = self.agreed_landmarks(terms)
        assert found is not None
        return found

    def _opened(self, publication: bytes, terms: Terms) -> Published:
        return open_sum(publication, terms, self._own_landmarks(terms))

    def _chosen(self, data: bytes, terms: Terms, told: Published) -> tuple[str, Chosen]:
        number, stage, made = open_chosen(data, terms)
        if number != told.number:
            raise InputError(f"a choice for publication {number} given with publication {told.number}")
        return stage, made

    def _seen(self, usable: Shard, terms: Terms, told: Published) -> Tensor:
        """Which rows are in everyone's sum."""
        assert usable.shared is not None
        return usable.shared if self._is_member(terms, told) else torch.zeros_like(usable.shared)

    def _remembered(self, terms: Terms) -> dict[str, Any]:
        """A fingerprint of the rows that are contributed, in any order, and their number."""
        rows = self._usable(terms).only_shared()
        features, targets = rows.features.contiguous().numpy(), rows.responses(0).contiguous().numpy()
        kind = f"{features.dtype} {features.shape[1]} {terms.class_names}\0".encode()
        each = sorted(
            hashlib.sha256(kind + row.tobytes() + own.tobytes()).digest()
            for row, own in zip(features, targets, strict=True)
        )
        return {"rows": hashlib.sha256(b"".join(each)).hexdigest(), "counts": {"all": len(rows)}}

    @cached_property
    def _fingerprint(self) -> str:
        """SHA-256 over the rows."""
        digest = hashlib.sha256(json.dumps([self.class_names, str(self.train.features.dtype)]).encode())
        for tensor in (self.train.features, self.train.responses(0)):
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()


def _likelihoods(shared: Shared, rows: NumberRows, seen: Tensor) -> Likelihoods:
    weights = open_weights(shared.asked.fixed)
    pairs = zip(shared.blocks(rows, seen), shared.primaries, strict=True)
    evidence = tuple({weight: beta_evidence(*pair, weight) for weight in weights} for pair in pairs)
    if not shared.asked.plain:
        return Likelihoods(evidence)
    left = [_plainly(shared, rows, seen, ridge) for ridge in RIDGES]
    errors = [float(each.square().nansum()) for each in left]
    judged = [float(each.isfinite().all(1).sum()) for each in left]
    return Likelihoods(evidence, torch.tensor([errors, judged], dtype=torch.float64))


def _plainly(shared: Shared, rows: NumberRows, seen: Tensor, ridge: float) -> Tensor:
    """What the plain ridge over everyone's rows leaves of each left-out row."""
    return shared.plain.left_out(shared.standardised(rows), rows.targets, rows.leaving.groups, seen, ridge)


def _left_out(shared: Shared, rows: NumberRows, seen: Tensor, made: Chosen) -> tuple[Tensor, Tensor]:
    """What each model leaves of each left-out row, (models, n, t), and what those leave that are shared."""
    models, alone = [], []
    of_map = zip(shared.blocks(rows, seen), shared.primaries, shared.settings(made), strict=True)
    for block, primary, (_, settings) in of_map:
        each, shared_alone = left_out(block, primary, settings)
        models.append(each)
        alone.append(shared_alone[None])
    if made.ridge is not None:
        pooled = _plainly(shared, rows, seen, made.ridge)
        own = own_ridge(rows, None)
        models.append(torch.stack([pooled, pooled if own is None else own.left_out]))
        alone.append(pooled[None])
    return torch.cat(models), torch.cat(alone)
