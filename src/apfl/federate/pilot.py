"""The pilot between machines: its four messages, and what a site and the server compute for them.

    question     server -> site   the sums of everyone's moments, which normalisations to try, and which landmarks of
                                  each stand clear of the others; the landmarks themselves everyone draws from a seed
    statistics   site -> server   of some rows, on the narrow map of every normalisation, as integers
    primaries    server -> site   the primary and the sketch of its leverage, for every normalisation, in 16 bits
    table        site -> server   left-out hits, for every normalisation and setting

The maths is that of the method (`apfl.maths.pilot`): from the same rows both choose the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apfl.data.federation import Shard
from apfl.errors import InputError
from apfl.federate.landmarks import VECTOR, packed, packing
from apfl.federate.messages import address, check_address, positive
from apfl.federate.names import check_name
from apfl.federate.plausible import check_integers
from apfl.federate.roll import Members, detached, digest_of, members_told
from apfl.federate.terms import Terms
from apfl.federate.wire import Expected, count, seal, sha256, text, unseal
from apfl.maths.bits import Layout
from apfl.maths.bounds import widest
from apfl.maths.dither import Uniform
from apfl.maths.integers import Encoding, statistics_layout
from apfl.maths.landmarks import independent
from apfl.maths.leaveout import leaving
from apfl.maths.normalise import Moments
from apfl.maths.personalise import Rows, Shared, leave_out, solve_primary
from apfl.maths.pilot import (
    BITS,
    CANDIDATES,
    MOST_ROWS,
    WIDTH,
    Candidate,
    Described,
    candidate,
    drawn_landmarks,
    n_points,
    rows_of_pilot,
)
from apfl.maths.ridge import one_hot
from apfl.maths.wire import from_columns, to_columns

__all__ = [
    "Primaries",
    "Question",
    "SentStatistics",
    "SentTable",
    "largest_statistics",
    "open_primaries",
    "open_question",
    "open_statistics",
    "open_table",
    "seal_primaries",
    "seal_question",
    "seal_statistics",
    "seal_table",
]

QUESTION, STATISTICS, PRIMARIES, TABLE = "pilot", "pilot statistics", "pilot primaries", "pilot table"
SETS = ("features", "root", "row")


# -------------------------------------------------------------------------------------------------------- question


@dataclass(frozen=True, eq=False)
class Question:
    """What is tried: every candidate with its map, under terms that fix all it takes."""

    terms: Terms
    n_all: int  # rows of all clients that count
    usual: str  # what the moments stand for
    candidates: Mapping[str, Candidate]
    shared: Described  # everyone's moments
    sha256: str

    @property
    def tried(self) -> list[str]:
        """The normalisations, in their order."""
        return list(self.candidates)

    @property
    def most_rows(self) -> int:
        """Of one client, that take part."""
        return rows_of_pilot(self.terms.most_rows or 0, self.n_all)

    def encoding(self, how: str) -> Encoding:
        """How the statistics of a candidate are integers."""
        return self.candidates[how].encoding(self.terms.n_classes, self.most_rows)

    @property
    def layout(self) -> Layout:
        """Of the statistics of all candidates in one vector."""
        parts = ((how, part) for how in self.tried for part in self.encoding(how).layout.parts)
        return Layout(tuple(replace(part, name=f"{how} {part.name}") for how, part in parts))

    def apart(self, vector: np.ndarray) -> dict[str, np.ndarray]:
        """The statistics of each candidate from such a vector."""
        ends = np.cumsum([self.encoding(how).layout.size for how in self.tried])
        return dict(zip(self.tried, np.split(vector, ends[:-1]), strict=True))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a table: left-out hits of every candidate and setting."""
        return (len(self.candidates), *self.terms.grid(1.0).shape)


def seal_question(terms: Terms, n_all: int, shared: Described, unsuited: Collection[str]) -> bytes:
    """What sites are to try, from the sum of everyone's moments; somebody's rows do not bear the ``unsuited``."""
    tried = [how for how in CANDIDATES if how == shared.usual or how not in unsuited]
    tensors, fingerprints = _sums(shared), []
    for how in tried:
        drawn = drawn_landmarks(shared.normalisers[how], shared, terms.seed, _widest(terms, n_all))
        kept = independent(drawn)
        tensors[f"{how}_kept"] = torch.zeros(drawn.width, dtype=torch.uint8).index_fill_(0, kept, 1)
        fingerprints.append(drawn.subset(kept).fingerprint)
    header = {
        "federation": terms.federation, "terms": terms.digest, "n": n_all, "described": shared.features.n_samples,
        "usual": shared.usual, "tried": tried, "fingerprints": fingerprints,
    }  # fmt: skip
    return seal(QUESTION, header, tensors)


def _widest(terms: Terms, n_all: int) -> int:
    """The most landmarks of a candidate: under masks a quarter of the rows in the pilot, whose sum is known."""
    return max(1, widest(min(n_all, MOST_ROWS))) if terms.masked else WIDTH


@lru_cache(maxsize=2)  # nearly always the same, and a map takes a while to draw
def open_question(data: bytes, terms: Terms) -> Question:
    """What these terms try; every map is drawn here, and checked against its fingerprint."""

    def expected(header: dict[str, Any]) -> Expected:
        check_address(header, terms)
        n = n_points(count(header, "described"), _widest(terms, count(header, "n")))
        sums: Expected = {f"{of}_{what}": (("F64",), (terms.n_features or 0,)) for of in SETS for what in _WHAT}
        return {**sums, **{f"{how}_kept": (("U8",), (n,)) for how in _tried(header)}}

    header, tensors = unseal(QUESTION, data, expected)
    for name in (f"{of}_{what}" for of in SETS for what in _WHAT):
        if not bool(torch.isfinite(tensors[name]).all()):
            raise InputError(f"a pilot whose {name} contains NaN or infinity; get it again from the server")
    tried, shared, n_all = _tried(header), _described(count(header, "described"), tensors), count(header, "n")
    # Under masks the rows of the largest site are known up to a power of two.
    most_rows = 1 if terms.masked else terms.most_rows or 0
    if not 1 <= most_rows <= n_all <= shared.features.n_samples:
        raise InputError(f"a pilot of {n_all} rows of {shared.features.n_samples} described contradicts itself")
    scalings, candidates = shared.normalisers, {}
    for how, fingerprint in zip(tried, header["fingerprints"], strict=True):
        kept = tensors[f"{how}_kept"].nonzero()[:, 0]
        if not len(kept):
            raise InputError(f"a pilot without landmarks for {how}; get it again from the server")
        widest_map = _widest(terms, n_all)
        candidates[how] = candidate(scalings[how], shared, terms.seed, kept=kept, widest=widest_map)
        if candidates[how].feature_map.fingerprint != fingerprint:
            raise InputError(
                f"the pilot's landmarks of seed {terms.seed} come out differently here: compare the versions of numpy "
                "and scipy with those of the server"
            )
    return Question(terms, n_all, text(header, "usual"), candidates, shared, sha256(data))


_WHAT = ("sums", "squares")


def _sums(shared: Described) -> dict[str, Tensor]:
    parts = zip(SETS, (shared.features, shared.root, shared.row), strict=True)
    return {
        name: sums for of, own in parts for name, sums in ((f"{of}_sums", own.sums), (f"{of}_squares", own.squares))
    }


def _described(n: int, tensors: Mapping[str, Tensor]) -> Described:
    none = torch.zeros(3, dtype=torch.float64)  # sizes decide what is usual, which the server has judged
    features, root, row = (
        Moments(n, tensors[f"{of}_sums"], tensors[f"{of}_squares"], none, "none" if of == "features" else of)
        for of in SETS
    )
    return Described(features, root, row)


def _tried(header: Mapping[str, Any]) -> list[str]:
    tried, fingerprints = header.get("tried"), header.get("fingerprints")
    if (
        not isinstance(tried, list) or not isinstance(fingerprints, list)
        or tried != [how for how in CANDIDATES if how in tried] or len(fingerprints) != len(tried)
        or header.get("usual") not in tried
    ):  # fmt: skip
        raise InputError(f"a pilot must list normalisations among {', '.join(CANDIDATES)}, the usual one with them")
    return tried


# ------------------------------------------------------------------------------------------------------ statistics


@dataclass(frozen=True, eq=False)
class SentStatistics:
    """A client's statistics of every candidate, as they arrived and were checked."""

    client: str
    integers: Mapping[str, np.ndarray]  # int64
    n_samples: int
    n_copies: int

    @property
    def n_judged(self) -> int:
        """Rows that can be left out."""
        return self.n_samples - self.n_copies


def largest_statistics(terms: Terms) -> int:
    """The most bytes of all candidates' statistics."""
    return len(CANDIDATES) * statistics_layout(WIDTH, terms.n_classes, BITS).n_bytes


def seal_statistics(question: Question, rows: Shard, client: str, draw: Callable[[str], Uniform]) -> bytes:
    """A client's rows on every candidate's map, as integers; what the server would refuse is refused here."""
    terms, targets = question.terms, one_hot(rows.labels, question.terms.n_classes)
    n_copies, cut, told, tensors = int(leaving(rows.features, rows.labels, None).copies.sum()), 0, {}, {}
    for how, each in question.candidates.items():
        encoding = question.encoding(how)
        vector, saturated = encoding.encode_rows(each.phi(rows.features), targets, draw(how), (n_copies, None))
        told[how], own = packed(encoding.packing(vector), vector)
        tensors[how], cut = own[VECTOR], cut + saturated
    header = {**address(terms, client), "pilot": question.sha256, "n": len(rows), "saturated": cut, "packed": told}
    sealed = seal(STATISTICS, header, tensors)
    open_statistics(sealed, question)
    return sealed


def open_statistics(data: bytes, question: Question) -> SentStatistics:
    """Statistics that some rows can have under every candidate: the same rows under all of them."""

    def packings(header: Mapping[str, Any]) -> dict[str, Any]:
        told = header.get("packed")
        if not isinstance(told, dict) or not all(isinstance(told.get(how), dict) for how in question.tried):
            raise InputError("a pilot's statistics must say how they are packed")
        return {how: packing(question.encoding(how).layout, told[how]) for how in question.tried}

    def expected(header: dict[str, Any]) -> Expected:
        _check_pilot(header, question)
        return {how: (("U8",), (how_packed.n_bytes,)) for how, how_packed in packings(header).items()}

    header, tensors = unseal(STATISTICS, data, expected)
    integers = {how: each.unpack(tensors[how].numpy()) for how, each in packings(header).items()}
    n, n_copies = _same_rows(integers, question)
    count(header, "saturated")
    if n != count(header, "n") or n > question.most_rows or n_copies >= n:
        raise InputError(
            f"n contradicts itself: {count(header, 'n')} rows in the header, {n} in the message, {n_copies} of them "
            f"copies; at most {question.most_rows} take part"
        )
    for how, vector in integers.items():
        check_integers(vector, question.encoding(how), question.terms)
    return SentStatistics(check_name("client", text(header, "client")), integers, n, n_copies)


def _same_rows(integers: Mapping[str, np.ndarray], question: Question) -> tuple[int, int]:
    """The numbers of rows and of copies, which no normalisation changes."""
    told = []
    for how, vector in integers.items():
        places = question.encoding(how).layout.places
        if vector[places["echo"]].any():
            raise InputError("a pilot's statistics with an echo, which has no place there")
        told.append(np.concatenate([vector[places[name]] for name in ("n_samples", "n_copies", "class_counts")]))
    if any(not np.array_equal(each, told[0]) for each in told):
        raise InputError("n contradicts itself: rows of each class that differ between normalisations")
    return int(told[0][0]), int(told[0][1])


def _check_pilot(header: Mapping[str, Any], question: Question) -> None:
    check_address(header, question.terms)
    if text(header, "pilot") != question.sha256:
        raise InputError("an answer to another pilot; get the present one from the server")


# ------------------------------------------------------------------------------------------------------- primaries


@dataclass(frozen=True, eq=False)
class Primaries:
    """The primary of every candidate as a client reads it."""

    shared: Mapping[str, Shared]
    units: Mapping[str, float]  # mean squared length of a row of phi
    gammas: Mapping[str, float]
    members: Members  # whether statistics are behind them, by their hash
    sha256: str

    def table(self, question: Question, rows: Shard) -> Tensor:
        """Left-out hits of a member's rows, for every candidate and setting, int64."""
        together = leaving(rows.features, rows.labels, rows.groups)
        tables = []
        for how, each in question.candidates.items():
            phi, tried = each.phi(rows.features), question.terms.grid(self.units[how])
            own = Rows(phi, phi, rows.labels, *together)
            tables.append(leave_out(own, self.shared[how], question.terms.method.smoothing, tried).table)
        return torch.stack(tables)


def seal_primaries(
    question: Question, sums: Mapping[str, np.ndarray], members: Sequence[str], *, listed: bool = False
) -> bytes:
    """The primary of every candidate, from the sums of its members' integers.

    Members are ``listed`` under masks: there everyone must be told the same bytes, and sums are over few.
    """
    terms, tensors, units, gammas = question.terms, {}, {}, {}
    for how, summed in sums.items():
        stats = replace(question.encoding(how).decode(torch.from_numpy(summed)), echo=None)
        primary = solve_primary(stats, "auto")  # one that is given is meant for the full map
        units[how], gammas[how] = primary.unit(stats.width), primary.gamma
        sketch = primary.with_leverage(terms.method.sketch, terms.seed).sketch
        assert sketch is not None, "terms have no exact leverage"
        for name, values in (("weights", primary.weights), ("leverage", sketch)):
            tensors[f"{how}_{name}"], tensors[f"{how}_{name}_scale"] = to_columns(values)
        tensors["class_counts"] = stats.class_counts
    header = {
        "federation": terms.federation, "terms": terms.digest, "pilot": question.sha256, "units": units,
        "gammas": gammas, "members": sorted(members) if listed else digest_of(members),
    }  # fmt: skip
    return seal(PRIMARIES, header, tensors)


def open_primaries(data: bytes, question: Question) -> Primaries:
    """The primaries of this pilot, with or without a member's proof in front."""
    proof, data = detached(data)
    terms = question.terms

    def expected(header: dict[str, Any]) -> Expected:
        _check_pilot(header, question)
        shapes: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {"class_counts": (("F64",), (terms.n_classes,))}
        for how, each in question.candidates.items():
            for name, columns in (("weights", terms.n_classes), ("leverage", terms.method.sketch)):
                shapes[f"{how}_{name}"] = (("I16",), (each.feature_map.width, columns))
                shapes[f"{how}_{name}_scale"] = (("F32",), (columns,))
        return shapes

    header, tensors = unseal(PRIMARIES, data, expected)
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise InputError(f"a pilot whose {name} contains NaN or infinity; get it again from the server")
    members = members_told(header.get("members"), proof, "a pilot")
    units, gammas = header.get("units"), header.get("gammas")
    if not isinstance(units, dict) or not isinstance(gammas, dict):
        raise InputError("a pilot's primaries must list their units and ridges")
    shared = {
        how: Shared(_columns(f"{how}_weights", tensors), tensors["class_counts"], _columns(f"{how}_leverage", tensors))
        for how in question.tried
    }
    return Primaries(
        shared, {how: positive(units, how) for how in question.tried},
        {how: positive(gammas, how) for how in question.tried}, members, sha256(data),
    )  # fmt: skip


def _columns(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    return from_columns(tensors[name], tensors[f"{name}_scale"])


# ----------------------------------------------------------------------------------------------------------- table


@dataclass(frozen=True, eq=False)
class SentTable:
    """A client's left-out hits as they arrived."""

    client: str
    primaries: str  # the hash of those that they were counted under
    hits: Tensor  # (candidates, betas, balances, taus), int64


def seal_table(question: Question, client: str, primaries: str, hits: Tensor) -> bytes:
    """A client's left-out hits under every candidate."""
    header = {**address(question.terms, client), "pilot": question.sha256, "primaries": primaries}
    return seal(TABLE, header, {"hits": hits})


def open_table(data: bytes, question: Question) -> SentTable:
    """A table of the agreed shape; whether it fits the client's rows, the server knows."""

    def expected(header: dict[str, Any]) -> Expected:
        _check_pilot(header, question)
        return {"hits": (("I64",), question.shape)}

    header, tensors = unseal(TABLE, data, expected)
    return SentTable(check_name("client", text(header, "client")), text(header, "primaries"), tensors["hits"])
