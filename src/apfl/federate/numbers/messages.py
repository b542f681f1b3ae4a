"""What travels in a federation whose targets are columns, besides descriptions, landmarks and statistics.

Everything is a sum over a site's rows, in double precision. What is drawn for rows in the bootstraps follows from the
rows themselves, so nobody else can undo it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from apfl.errors import InputError
from apfl.federate.landmarks import Landmarks
from apfl.federate.messages import address, check_address, positive
from apfl.federate.names import check_name
from apfl.federate.numbers.shared import STAGES, Chosen, Shared, asked_of, maps_of
from apfl.federate.roll import Members, detached, digest_of, members_told
from apfl.federate.terms import Terms
from apfl.federate.wire import Expected, count, seal, sha256, text, unseal
from apfl.maths.landmarks import Spread
from apfl.maths.regression import DECADES, DRAWS, Drawn, Evidence, NumberStatistics, open_weights
from apfl.maths.ridge_cv import RIDGES
from apfl.maths.wire import pack, unpack
from apfl.methods._numbers import MAPS, THRESHOLDS, Labelled

__all__ = [
    "Errors",
    "Likelihoods",
    "Published",
    "SentSpread",
    "SentTable",
    "Table",
    "open_chosen",
    "open_spread",
    "open_sum",
    "open_table",
    "seal_chosen",
    "seal_spread",
    "seal_sum",
    "seal_table",
]

Tensors = dict[str, Tensor]


# ------------------------------------------------------------------------------------------------------- moments


@dataclass(frozen=True, eq=False)
class SentSpread:
    """A client's moments as they arrived."""

    client: str
    spread: Spread

    @property
    def n_samples(self) -> int:
        return self.spread.n_samples


def seal_spread(own: Spread, outline: Terms, client: str) -> bytes:
    """The moments of a client's rows at one length."""
    products = pack(own.products) if own.products.ndim == 2 else own.products
    header = {**address(outline, client), "n": own.n_samples}
    return seal("spread", header, {"sums": own.sums, "products": products})


def open_spread(data: bytes, outline: Terms) -> SentSpread:
    """Moments under this outline that n rows of length sqrt(l) can have."""
    width, full = outline.n_in, outline.spread == "full"

    def expected(header: dict[str, Any]) -> Expected:
        check_address(header, outline)
        size = width * (width + 1) // 2 if full else width
        return {"sums": (("F64",), (width,)), "products": (("F64",), (size,))}

    header, tensors = unseal("spread", data, expected)
    _check_finite("moments", tensors)
    n, products = count(header, "n"), unpack(tensors["products"]) if full else tensors["products"]
    squares = products.diagonal() if full else products
    most = n * width * (1 + 1e-3)  # rows are scaled in single precision
    short = tensors["sums"].square() <= n * squares * (1 + 1e-3) + 1e-6 * most
    if not 1 <= n <= (outline.most_rows or 0) or float(squares.min()) < 0 or float(squares.sum()) > most:
        raise InputError(f"moments that {n} rows do not have: squares that sum to {float(squares.sum()):.4g}")
    if not bool(short.all()):
        raise InputError(f"moments that {n} rows do not have: sums whose squares pass n times the sums of squares")
    return SentSpread(check_name("client", text(header, "client")), Spread(n, tensors["sums"], products))


# --------------------------------------------------------------------------------------------------- publication


@dataclass(frozen=True, eq=False)
class Published:
    """Everyone's sum as a client reads it."""

    number: int
    shared: Shared
    members: Members


def seal_sum(
    terms: Terms, number: int, stats: NumberStatistics, gammas: Sequence[float], members: Sequence[str]
) -> bytes:
    """Everyone's sum, and the ridge of the primary on each map."""
    header = {
        "federation": terms.federation, "terms": terms.digest, "number": number, "gammas": list(gammas),
        "n": stats.n_samples, "n_copies": stats.n_copies, "members": digest_of(members),
    }  # fmt: skip
    energy = torch.tensor(stats.target_energy, dtype=torch.float64)
    tensors = {
        "autocorrelation": pack(stats.autocorrelation), "crosscorrelation": stats.crosscorrelation,
        "target_sums": stats.class_counts, "target_energy": energy,
    }  # fmt: skip
    return seal("sum", header, tensors)


def open_sum(data: bytes, terms: Terms, landmarks: Landmarks) -> Published:
    """A publication under these terms, with or without a member's proof in front."""
    proof, data = detached(data)
    d, t = terms.width, terms.n_classes

    def expected(header: dict[str, Any]) -> Expected:
        check_address(header, terms)
        shapes = {"autocorrelation": (d * (d + 1) // 2,), "crosscorrelation": (d, t), "target_sums": (t,)}
        return {name: (("F64",), shape) for name, shape in {**shapes, "target_energy": ()}.items()}

    header, tensors = unseal("sum", data, expected)
    _check_finite("a publication", tensors)
    stats = NumberStatistics(
        unpack(tensors["autocorrelation"]), tensors["crosscorrelation"], tensors["target_sums"], count(header, "n"),
        float(tensors["target_energy"]), count(header, "n_copies"),
    )  # fmt: skip
    gammas = _listed(header, "gammas", len(MAPS))
    members = members_told(header.get("members"), proof, "a publication")
    shared = Shared(terms, maps_of(terms, landmarks), stats, gammas)
    return Published(count(header, "number"), shared, members)


# -------------------------------------------------------------------------------------------------------- tables


@dataclass(frozen=True, eq=False)
class Likelihoods:
    """What one client's rows say of each beta on each map, and its left-out errors of each plain ridge."""

    evidence: tuple[dict[float, Evidence], ...]  # of each map, by the weight on the primary
    plain: Tensor | None = None  # (2, ridges): sums of squares, and how many rows can be judged

    def __add__(self, other: Likelihoods) -> Likelihoods:
        pairs = zip(self.evidence, other.evidence, strict=True)
        summed = tuple({weight: own[weight] + its[weight] for weight in own} for own, its in pairs)
        plain = None if self.plain is None or other.plain is None else self.plain + other.plain
        return Likelihoods(summed, plain)

    def tensors(self) -> Tensors:
        """As they travel."""
        told = [each for own in self.evidence for each in own.values()]
        found: Tensors = {}
        if told:
            found["evidence"] = torch.stack([torch.stack([each.lost, each.left, each.volume]) for each in told])
            found["rows"] = torch.tensor([each.n for each in told])
        return found if self.plain is None else {**found, "plain": self.plain}

    @staticmethod
    def of(tensors: Mapping[str, Tensor], terms: Terms) -> Likelihoods:
        """Back from what travelled."""
        weights, place, found = open_weights(asked_of(terms).fixed), 0, []
        for _ in MAPS:
            own = {}
            for weight in weights:
                own[weight] = Evidence(int(tensors["rows"][place]), *tensors["evidence"][place])
                place += 1
            found.append(own)
        return Likelihoods(tuple(found), tensors.get("plain"))


@dataclass(frozen=True, eq=False)
class Errors:
    """One client's squared errors of left-out rows: of every model, and of those that are shared."""

    models: Drawn
    shared: Drawn

    def __add__(self, other: Errors) -> Errors:
        return Errors(self.models + other.models, self.shared + other.shared)

    def tensors(self) -> Tensors:
        """As they travel."""
        drawn = {"models": self.models, "shared": self.shared}
        found = {name: torch.cat([each.errors, each.weights[:, None]], 1) for name, each in drawn.items()}
        return {**found, "rows": torch.tensor([each.n for each in drawn.values()])}

    @staticmethod
    def of(tensors: Mapping[str, Tensor], terms: Terms) -> Errors:
        """Back from what travelled."""
        parts = zip((tensors["models"], tensors["shared"]), tensors["rows"].tolist(), strict=True)
        return Errors(*(Drawn(each[:, :-1], each[:, -1], n) for each, n in parts))


Table = Likelihoods | Errors | Labelled


@dataclass(frozen=True, eq=False)
class SentTable:
    """A client's table of one stage as it arrived."""

    client: str
    number: int  # of the publication
    stage: str
    after: str  # the hash of what was chosen before
    table: Table
    sha256: str


def seal_table(terms: Terms, client: str, number: int, stage: str, after: str, table: Table) -> bytes:
    """A client's table."""
    tensors = _labels(table) if isinstance(table, Labelled) else table.tensors()
    return seal("table", {**address(terms, client), "number": number, "stage": stage, "after": after}, tensors)


def _labels(table: Labelled) -> Tensors:
    return {"given": table.given, "right": table.right, "held": table.held}


def open_table(data: bytes, terms: Terms) -> SentTable:
    """A table of the agreed shape, that some rows can have."""

    def expected(header: dict[str, Any]) -> Expected:
        check_address(header, terms)
        return _shapes(text(header, "stage"), terms)

    header, tensors = unseal("table", data, expected)
    _check_finite("a table", tensors)
    stage = text(header, "stage")
    if any(float(each.min()) < 0 for each in tensors.values()):
        raise InputError(f"a table of {stage} with numbers below zero, which sums of squares and counts are not")
    if stage == STAGES[2] and bool((tensors["right"] > tensors["given"]).any()):
        raise InputError("a table of labels in which more rows are right than are given a label")
    table: Table = (
        Likelihoods.of(tensors, terms) if stage == STAGES[0] else Errors.of(tensors, terms) if stage == STAGES[1]
        else Labelled(tensors["given"], tensors["right"], tensors["held"])
    )  # fmt: skip
    client = check_name("client", text(header, "client"))
    return SentTable(client, count(header, "number"), stage, text(header, "after"), table, sha256(data))


def _shapes(stage: str, terms: Terms) -> Expected:
    asked, t = asked_of(terms), terms.n_classes
    n_open = len(MAPS) * len(open_weights(asked.fixed))
    if stage == STAGES[0]:
        found: dict[str, tuple[tuple[str, ...], tuple[int, ...]]] = {}
        if n_open:
            found |= {"evidence": (("F64",), (n_open, 3, len(DECADES))), "rows": (("I64",), (n_open,))}
        return {**found, "plain": (("F64",), (2, len(RIDGES)))} if asked.plain else found
    if stage == STAGES[1]:
        sizes = {"models": n_models(terms) + 1, "shared": len(MAPS) + asked.plain + 1}
        return {**{name: (("F64",), (DRAWS, m)) for name, m in sizes.items()}, "rows": (("I64",), (2,))}
    if stage == STAGES[2] and asked.labels:
        tried = (("I64",), (t, len(THRESHOLDS)))
        return {"given": tried, "right": tried, "held": (("I64",), (t,))}
    raise InputError(f"a table of {stage[:40]!r}; these terms have none")


def n_models(terms: Terms) -> int:
    """How many models are averaged under these terms."""
    weight, _, balance = asked_of(terms).fixed
    of_map = sum(2 if each and balance is None else 1 for each in ((1.0, 0.0) if weight is None else (weight,)))
    return len(MAPS) * of_map + 2 * asked_of(terms).plain


# -------------------------------------------------------------------------------------------------------- choice


def seal_chosen(terms: Terms, number: int, stage: str, chosen: Chosen, tables: Sequence[str]) -> bytes:
    """What the stages up to this one have chosen, by the tables with these hashes."""
    header = {
        "federation": terms.federation, "terms": terms.digest, "number": number, "stage": stage,
        "betas": [list(each.values()) for each in chosen.betas], "counted": digest_of(tables),
    }  # fmt: skip
    given = {name: getattr(chosen, name) for name in ("ridge", "shares", "anybody", "thresholds")}
    return seal("choice", header | {name: value for name, value in given.items() if value is not None}, {})


def open_chosen(data: bytes, terms: Terms) -> tuple[int, str, Chosen]:
    """The publication that was chosen for, the last stage, and the choice."""

    def expected(header: dict[str, Any]) -> Expected:
        check_address(header, terms)
        return {}

    header, _ = unseal("choice", data, expected)
    asked, stage = asked_of(terms), text(header, "stage")
    if stage not in STAGES:
        raise InputError(f"a choice of {stage[:40]!r} given; allowed are {', '.join(STAGES)}")
    told, weights = header.get("betas"), open_weights(asked.fixed)
    if not isinstance(told, list) or len(told) != len(MAPS):
        raise InputError(f"a choice must list betas for each of {len(MAPS)} maps")
    betas = tuple(dict(zip(weights, _listed({"betas": each}, "betas", len(weights)), strict=True)) for each in told)
    later, last = stage != STAGES[0], stage == STAGES[2]
    chosen = Chosen(
        betas,
        positive(header, "ridge") if asked.plain else None,
        _listed(header, "shares", n_models(terms)) if later else None,
        _listed(header, "anybody", len(MAPS) + asked.plain) if later else None,
        _listed(header, "thresholds", terms.n_classes) if last else None,
    )
    return count(header, "number"), stage, chosen


def _listed(header: Mapping[str, Any], name: str, n: int) -> tuple[float, ...]:
    """So many finite numbers, 0 or more."""
    told = header.get(name)
    if not isinstance(told, list) or len(told) != n:
        raise InputError(f"{name} must be {n} numbers; {str(told)[:60]} given")
    return tuple(positive({name: value}, name, zero=True) for value in told)


def _check_finite(what: str, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not all(map(math.isfinite, (float(tensor.min()), float(tensor.max())))):
            raise InputError(f"{what} whose {name} contains NaN or infinity; send it again")
