"""A client whose rows do not fit into memory: its messages are made from the parts that `apfl stats` wrote.

Under landmark terms its personal model comes from its own sums, with no further look at the rows: both streams see the
same phi, so that P_k = (S + beta I)^-1 (B - S G) for its S = Phi'Phi and B = Phi'Y. It sends no table of left-out hits
and does not judge whether it had better go alone, since both need single rows. Under a random map it has the sums of
the primary stream alone, and its model is the primary.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apfl.data.federation import Shard
from apfl.errors import InputError
from apfl.federate.contribution import encode_sums
from apfl.federate.disclosure import WhatLeaves, leaves_of
from apfl.federate.fitting import one_stream
from apfl.federate.landmarks import agreed_maps
from apfl.federate.messages import Broadcast, open_publication, seal_description
from apfl.federate.site import Site
from apfl.federate.stats.parts import Part, read_part, stage_in
from apfl.federate.stats.stages import stage_of
from apfl.federate.terms import Description, Terms
from apfl.maths.hits import local_prior
from apfl.maths.landmarks import LandmarkMap, Spread
from apfl.maths.personalise import Plan
from apfl.maths.ridge import Statistics, solve
from apfl.models.landmark import LandmarkModel

__all__ = ["StreamedSite"]

TERMS = {"description": "invitation.json", "moments": "outline.json", "statistics": "agreed.json"}  # for the next pass


class StreamedSite(Site):
    """One client with the parts of its shards: ``parts`` is a file, or a folder of them, one for each pass."""

    def __init__(self, folder: str | Path, name: str, parts: str | Path, *, rounding_seed: int | None = None) -> None:
        nothing = Shard(torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64))
        super().__init__(folder, name, nothing, (), rounding_seed=rounding_seed)
        self.parts = Path(parts)

    # ---------------------------------------------------------------------------------------- what leaves

    def what_leaves(self, agreement: bytes) -> WhatLeaves:
        """What this client would send, by the parts at hand."""
        terms = Terms.from_json(agreement)
        part = self._part(terms) if terms.digest in self._files else self._latest()
        counts = dict(zip(part.names, part.counts.tolist(), strict=True))
        return leaves_of(counts, part.contributed, part.unknown, part.n_features, terms)

    def describe(self, invitation: bytes) -> bytes:
        """The first message, from the part under the draft."""
        draft = self._in_the_clear(Terms.from_json(invitation))
        if draft.pilots:
            raise InputError(
                f"{self.name} takes part with sums alone, and a pilot that chooses the normalisation needs rows: the "
                "terms must state it (server --set normalise=root, row or columns)"
            )
        part = self._part(draft)
        own = part.described.moments(part.n_samples)
        self.write(draft, "draft.json", draft.to_json().encode())
        present = tuple(part.contributed)
        return seal_description(Description(self.name, part.n_samples, part.n_features, present, own), draft)

    def _spread_of_rows(self, terms: Terms) -> Spread:
        return self._part(terms).spread()

    def _encoded(self, terms: Terms, nonce: str) -> bytes:
        """The statistics of the part under these terms as they travel: rounded here, once."""
        part = self._part(terms)
        if terms.row_limit is not None and part.n_samples > terms.row_limit:
            share = terms.row_limit / part.n_samples
            raise InputError(
                f"{part.n_samples} rows; the terms let one client contribute at most {terms.row_limit}. Make the "
                f"statistics of a share of the rows: apfl stats ... --share {np.floor(950 * share) / 1000:g}"
            )
        self._check_admitted(part, terms)
        draw = self._dither(terms, f"statistics{nonce}")
        return encode_sums(part.statistics(), terms, self.agreed_landmarks(terms), self.name, nonce, draw)

    def _check_admitted(self, part: Part, terms: Terms) -> None:
        """Under masks classes that too few sites hold stay out; sums that have them cannot be taken apart."""
        counts = self._counts(terms)
        admitted = (True,) * terms.n_classes if counts is None else counts.admitted
        names = [
            name for name, may in zip(terms.class_names or (), admitted, strict=True)
            if not may and name in part.contributed
        ]  # fmt: skip
        if names:
            raise InputError(
                f"the statistics of {self.name} have rows of classes that too few sites hold ({', '.join(names[:8])}): "
                "take these rows out of the shards, and make the statistics again"
            )

    def table(self, agreement: bytes, publication: bytes) -> bytes:
        """Nothing: single rows are needed to leave one out."""
        raise InputError(
            f"{self.name} takes part with sums alone: it sends no table of left-out hits, and has the settings that "
            "the other sites' tables choose"
        )

    def count(self, terms: Terms) -> np.ndarray:
        """Rows of each class that this client would contribute, and whether it has any, int64 (2 c,)."""
        contributed = self._latest().contributed
        counts = np.array([contributed.get(name, 0) for name in terms.class_names or ()], np.int64)
        if not (self.home(terms) / "draft.json").is_file():
            self.write(terms, "draft.json", terms.to_json().encode())
        return np.concatenate([counts, counts > 0]).astype(np.int64)

    def shared_features(self, terms: Terms) -> Tensor:
        """Nothing: a part knows no largest entries."""
        raise InputError(
            f"{self.name} takes part with sums alone, and masked terms that make their normalisation from moments need "
            "rows: the terms must state another (server --set normalise=root or row)"
        )

    def left_out(self, terms: Terms, number: int, publication: bytes) -> tuple[Tensor, int]:
        """Under masks: no hits, of no rows."""
        return torch.zeros(terms.table_shape, dtype=torch.int64), 0

    # ----------------------------------------------------------------------------------- what stays here

    def refine(self, agreement: bytes, publication: bytes, choice: bytes | None = None) -> Path:
        """Fit the personal model to a publication from this client's own sums, and write it."""
        terms = self._agreed(agreement)
        broadcast = open_publication(publication, terms)
        landmarks = self.agreed_landmarks(terms)
        like = torch.zeros(1, 1)
        primary_map = agreed_maps(terms, like, landmarks)[0]
        told = "the primary alone"
        model = one_stream(primary_map, broadcast.weights, terms.normaliser(), terms.class_names)
        if isinstance(primary_map, LandmarkMap) and not (terms.choice.open and terms.method.scope == "client"):
            plan = self._plan(terms, broadcast, choice)
            model = self._personal(primary_map, terms, broadcast, plan)
            told = "from sums, without left-out rows"
        container = model.container()
        container.settings.update(publication=broadcast.number, about=self.about, alone=False, fitted=told)
        return self._write_model(container, terms)

    def _personal(self, landmark_map: LandmarkMap, terms: Terms, broadcast: Broadcast, plan: Plan) -> LandmarkModel:
        beta, balance, tau = plan.setting
        own = self._part(terms).statistics()
        primary = plan.weight * broadcast.weights
        refinement = refinement_of_sums(own, primary, beta)
        counts = own.class_counts
        everyone = torch.maximum(broadcast.class_counts, counts)
        prior = tau * local_prior(counts, everyone, terms.method.smoothing) if tau else None
        weights = landmark_map.fold(primary + balance * refinement)
        return LandmarkModel(landmark_map, weights, terms.normaliser(), terms.class_names, prior=prior)

    # --------------------------------------------------------------------------------------------- within

    @property
    def _files(self) -> dict[str, Path]:
        """Digest of the terms -> the part that was made under them."""
        paths = sorted(self.parts.glob("*.safetensors")) if self.parts.is_dir() else [self.parts]
        return {stage_in(path).terms.digest: path for path in paths if path.is_file()}

    def _part(self, terms: Terms) -> Part:
        """The part under these terms, or how to make it."""
        stage = stage_of(terms)
        path = self._files.get(terms.digest)
        if path is not None:
            return read_part(path, stage)
        name = TERMS[stage.kind]
        self.write(terms, name, terms.to_json().encode())
        raise InputError(
            f"{self.parts} has no {stage.kind} of {self.name} under these terms. Make them at the site: apfl stats "
            f"SHARD... --terms {self.home(terms) / name} --out {self._place(stage.kind)}; the next run of the server "
            "asks again"
        )

    def _place(self, kind: str) -> Path:
        return self.parts / f"{kind}.safetensors" if self.parts.is_dir() else self.parts

    def _latest(self) -> Part:
        """The part of the last pass that was made."""
        found = {stage_in(path).kind: path for path in self._files.values()}
        for kind in ("statistics", "moments", "description"):
            if kind in found:
                return read_part(found[kind], stage_in(found[kind]))
        raise InputError(f"{self.parts} has no part that `apfl stats` has made")

    @cached_property
    def _fingerprint(self) -> str:
        """SHA-256 over the shards and which of their rows are used."""
        return self._identity(self._latest())

    @staticmethod
    def _identity(part: Part) -> str:
        told = [sorted(part.shards), dict(part.options)]
        return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()

    def _remembered(self, terms: Terms) -> dict[str, Any]:
        part = self._part(terms)
        return {"rows": self._identity(part), "counts": part.contributed}


def refinement_of_sums(own: Statistics, primary: Tensor, beta: float) -> Tensor:
    """P = (S + beta I)^-1 (B - S G) (d, c), for a client's own S and B on the map of the primary G.

    >>> rows, targets = torch.eye(2).double(), torch.eye(2).double()
    >>> from apfl.maths.ridge import statistics
    >>> refinement_of_sums(statistics(rows, targets), torch.zeros(2, 2).double(), 3.0).tolist()
    [[0.25, 0.0], [0.0, 0.25]]
    """
    residual = torch.addmm(own.crosscorrelation, own.autocorrelation, primary, alpha=-1)
    return solve(replace(own, crosscorrelation=residual), beta)
