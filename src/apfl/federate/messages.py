"""The other messages: a description, a publication, a table of hits, a choice, metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from apfl.errors import InputError
from apfl.federate.names import check_name
from apfl.federate.private.account import Budget, check_told
from apfl.federate.roll import Members, detached, digest_of, members_told
from apfl.federate.terms import MOST_CLASSES, Description, Terms, check_class_names
from apfl.federate.wire import Expected, count, seal, sha256, text, unseal
from apfl.maths.normalise import Moments, needs_moments
from apfl.maths.personalise import Plan, Setting, plan_of
from apfl.maths.pilot import CANDIDATES, Described
from apfl.maths.wire import from_columns, to_columns

__all__ = [
    "Broadcast", "Choice", "Table", "address", "check_address", "open_choice", "open_description", "open_metrics",
    "open_publication", "open_table", "positive", "seal_choice", "seal_description", "seal_metrics", "seal_publication",
    "seal_table",
]  # fmt: skip


def seal_description(description: Description, draft: Terms) -> bytes:
    """Before anything is agreed: n, feature width, class names, and the moments if the normalisation needs them."""
    tensors = {"n": torch.tensor(description.n_samples)}
    own, told = description.moments, description.described
    if told is not None:
        own = told.features
        tensors |= {"root_sums": told.root.sums, "root_squares": told.root.squares}
        tensors |= {"row_sums": told.row.sums, "row_squares": told.row.squares}
    if own is not None:
        tensors |= {"sums": own.sums, "squares": own.squares, "sizes": own.sizes}
    if description.targets is not None:
        tensors |= {"target_sums": description.targets.sums, "target_squares": description.targets.squares}
    header = {
        **address(draft, description.client), "n": description.n_samples, "n_features": description.n_features,
        "classes": list(description.class_names),
    }  # fmt: skip
    if draft.numeric:
        header["target"] = draft.target
    if description.unsuited:
        header["unsuited"] = list(description.unsuited)
    return seal("description", header, tensors)


def open_description(data: bytes, draft: Terms) -> Description:
    """A description under this draft, checked."""
    with_moments = needs_moments(draft.method.normalise)

    def expected(header: dict[str, Any]) -> Expected:
        check_address(header, draft)
        size = (count(header, "n_features", 2**24),)
        extra: Expected = {}
        if with_moments:
            extra = {"sums": (("F64",), size), "squares": (("F64",), size), "sizes": (("F64",), (3,))}
        if draft.pilots:
            more = ("root_sums", "root_squares", "row_sums", "row_squares")
            extra = {**extra, **dict.fromkeys(more, (("F64",), size))}
        if draft.numeric:
            extra = {**extra, **dict.fromkeys(("target_sums", "target_squares"), (("F64",), (draft.n_classes,)))}
        return {"n": (("I64",), ()), **extra}

    header, tensors = unseal("description", data, expected)
    names, n = _described_classes(header, draft), count(header, "n")
    if draft.numeric:
        return _described_numbers(header, tensors, draft)
    if n < 1 or n < len(names) * draft.min_per_class:
        raise InputError(f"a description of {n} rows in {len(names)} classes contradicts itself")
    client, n_features = check_name("client", text(header, "client")), count(header, "n_features", 2**24)
    if not with_moments:
        return Description(client, n, n_features, names)
    of = "root" if draft.method.normalise == "centred" else "none"
    own = _described_moments(n, tensors, of)
    if not draft.pilots:
        return Description(client, n, n_features, names, own)
    root, row = (_moments_of_one_length(n, tensors, how) for how in ("root", "row"))
    return Description(client, n, n_features, names, described=Described(own, root, row), unsuited=_unsuited(header))


def _described_numbers(header: Mapping[str, Any], tensors: Mapping[str, Tensor], draft: Terms) -> Description:
    """A description whose targets are columns: those of the terms, in any order."""
    names, n = _described_classes(header, draft), count(header, "n")
    if n < 1 or header.get("target") != draft.target:
        raise InputError(
            f"a description of {n} rows for {str(header.get('target'))[:40]}; the terms say {draft.target}"
        )
    none = torch.zeros(3, dtype=torch.float64)
    targets = Moments(n, tensors["target_sums"], tensors["target_squares"], none)
    _check_squares(targets)
    if draft.target == "multilabel" and not (
        torch.equal(targets.sums, targets.squares)
        and torch.equal(targets.sums, targets.sums.round())
        and 0 <= float(targets.sums.min()) <= float(targets.sums.max()) <= n
    ):
        raise InputError(f"numbers of labels that {n} rows do not have: each row has a label or has it not")
    return Description(
        check_name("client", text(header, "client")), n, count(header, "n_features", 2**24), names,
        _described_moments(n, tensors, "none"), targets=targets,
    )  # fmt: skip


def _described_classes(header: Mapping[str, Any], draft: Terms) -> tuple[str, ...]:
    """The classes that a client lists: names, each once, and no more than one client may fix for everyone."""
    names = header.get("classes")
    if not isinstance(names, list) or not all(isinstance(each, str) and len(each) <= 1000 for each in names):
        raise InputError("a description must list class names")
    if draft.class_names is None and len(names) > MOST_CLASSES:
        raise InputError(
            f"a description of {len(names)} classes; allowed are {MOST_CLASSES}, unless the terms of the federation "
            "state the classes"
        )
    check_class_names(names)
    if len(set(names)) < len(names):
        raise InputError(
            f"a description of {len(names)} classes, of which {len(set(names))} differ, contradicts itself"
        )
    return tuple(names)


def _unsuited(header: Mapping[str, Any]) -> tuple[str, ...]:
    """The normalisations that a client's rows do not bear."""
    given = header.get("unsuited", [])
    if not isinstance(given, list) or any(how not in CANDIDATES for how in given):
        raise InputError(f"normalisations {str(given)[:60]} given; allowed are {', '.join(CANDIDATES)}")
    return tuple(given)


def _moments_of_one_length(n: int, tensors: Mapping[str, Tensor], how: Literal["root", "row"]) -> Moments:
    """The moments of a client's rows at the root or at one length, if ``n`` rows of length sqrt(l) can have them."""
    sums, squares = tensors[f"{how}_sums"], tensors[f"{how}_squares"]
    own = Moments(n, sums, squares, torch.zeros(3, dtype=torch.float64), how)
    _check_squares(own)
    most = n * len(sums) * (1 + 1e-3)  # rows are scaled in single precision
    if float(own.squares.sum()) > most:
        raise InputError(f"moments that {n} rows of one length do not have: squares that sum to more than {most:.6g}")
    return own


def _check_squares(own: Moments) -> None:
    spread = own.squares * own.n_samples - own.sums.square()  # n^2 times the variance
    if not bool(torch.isfinite(spread).all()) or bool((spread < -1e-9 * own.sums.square()).any()):
        raise InputError("moments that no rows have: sums of squares below the squares of the sums, or not finite")


def _described_moments(n: int, tensors: Mapping[str, Tensor], of: str) -> Moments:
    """The moments of a description, if ``n`` rows can have them."""
    own = Moments(n, tensors["sums"], tensors["squares"], tensors["sizes"], of)
    _check_squares(own)
    finite = bool(torch.isfinite(own.sizes).all())
    # Not `in range(n + 1)`: Python looks for a float there one number after the other, and the client chooses n.
    n_sized = float(own.sizes[0]) if finite else math.nan
    if not (0 <= n_sized <= n and n_sized.is_integer()) or own.variance_of_sizes < -1e-6:
        raise InputError(f"sizes that no {n} rows have: {[round(each, 3) for each in own.sizes.tolist()]}")
    return own


@dataclass(frozen=True, eq=False)
class Broadcast:
    """A publication as a client reads it."""

    number: int
    weights: Tensor  # G (d, c), float64
    gamma: float
    unit: float  # mean squared length of a row of Psi: the unit of the beta grid
    n_samples: int
    class_counts: Tensor  # (c,), float64
    leverage: Tensor | None  # its sketch (d, m)
    members: Members  # whether a contribution is in it, by its content hash
    account: Mapping[str, Any] | None = None  # under epsilon: what was released so far


def seal_publication(
    terms: Terms, number: int, weights: Tensor, gamma: float, unit: float, counts: Tensor, leverage: Tensor | None,
    members: Sequence[str], account: Mapping[str, Any] | None = None,
) -> bytes:  # fmt: skip
    """The primary stream with what clients need to refine it."""
    tensors = {**_columns("weights", weights, terms), "class_counts": counts}
    if leverage is not None:
        tensors |= _columns("leverage", leverage, terms)
    header = {
        "federation": terms.federation, "terms": terms.digest, "number": number, "gamma": gamma, "unit": unit,
        "members": digest_of(members),
    }  # fmt: skip
    if account is not None:
        header["account"] = dict(account)
    return seal("publication", header, tensors)


def open_publication(data: bytes, terms: Terms) -> Broadcast:
    """A publication under these terms, with or without a member's proof in front."""
    proof, data = detached(data)

    def expected(header: dict[str, Any]) -> Expected:
        check_address(header, terms)
        found = {**_expected_columns("weights", terms.n_classes, terms), "class_counts": (("F64",), (terms.n_classes,))}
        if terms.wants_leverage:
            found |= _expected_columns("leverage", terms.method.sketch, terms)
        return found

    header, tensors = unseal("publication", data, expected)
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise InputError(f"a publication whose {name} contains NaN or infinity; get it again from the server")
    members = members_told(header.get("members"), proof, "a publication")
    leverage = _published("leverage", tensors) if terms.wants_leverage else None
    counts = tensors["class_counts"]
    return Broadcast(
        count(header, "number"), _published("weights", tensors), positive(header, "gamma"),
        positive(header, "unit"), int(counts.sum()), counts, leverage, members,
        check_told(header.get("account"), Budget.of(terms)) if terms.private else None,
    )  # fmt: skip


def _columns(name: str, values: Tensor, terms: Terms) -> dict[str, Tensor]:
    """A published matrix as it travels: in 16 bits with a scale for each column, or as floating-point numbers."""
    if terms.published_dtype != torch.int16:
        return {name: values.to(terms.published_dtype)}
    integers, scale = to_columns(values)
    return {name: integers, f"{name}_scale": scale}


def _expected_columns(name: str, n: int, terms: Terms) -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
    if terms.published_dtype == torch.int16:
        return {name: (("I16",), (terms.width, n)), f"{name}_scale": (("F32",), (n,))}
    return {name: (("F64",) if terms.published_dtype == torch.float64 else ("F32",), (terms.width, n))}


def _published(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    """The matrix back, float64."""
    scale = tensors.get(f"{name}_scale")
    return tensors[name].to(torch.float64) if scale is None else from_columns(tensors[name], scale)


@dataclass(frozen=True, eq=False)
class Table:
    """A client's left-out hits under one publication."""

    client: str
    number: int
    hits: Tensor  # (betas, balances, taus), int64; for each weight on the primary, if several are tried
    sha256: str


def seal_table(terms: Terms, client: str, number: int, hits: Tensor) -> bytes:
    """A client's left-out hits, at most 2,000 integers."""
    return seal("table", {**address(terms, client), "number": number}, {"hits": hits})


def open_table(data: bytes, terms: Terms) -> Table:
    """A table of the agreed shape; whether it fits the client's n, the coordinator knows."""

    def expected(header: dict[str, Any]) -> Expected:
        check_address(header, terms)
        return {"hits": (("I64",), terms.table_shape)}

    header, tensors = unseal("table", data, expected)
    return Table(check_name("client", text(header, "client")), count(header, "number"), tensors["hits"], sha256(data))


@dataclass(frozen=True, eq=False)
class Choice:
    """What the summed tables chose."""

    number: int  # of the publication
    plan: Plan  # beta, balance and tau for each weight on the primary, and the weight
    n_samples: int  # rows behind it
    counted: Members  # the tables in the sum: how many, and the digest of their hashes

    @property
    def setting(self) -> Setting:
        """beta, balance, tau with the weight that was chosen."""
        return self.plan.setting


def seal_choice(
    terms: Terms, number: int, unit: float, summed: Tensor, tables: Sequence[str], n_samples: int
) -> bytes:  # fmt: skip
    """One setting for everyone from the summed tables, known by their hashes, for each weight; and one weight."""
    plan = plan_of(terms.by_weight(summed), terms.grid(unit), n_samples) if tables else terms.fixed_plan(unit)
    header = {
        "federation": terms.federation, "terms": terms.digest, "number": number, "setting": list(plan.setting),
        "n": n_samples, "counted": digest_of(tables),
    }  # fmt: skip
    if len(plan.settings) > 1:
        header |= {"weight": plan.weight, "settings": [[w, *setting] for w, setting in plan.settings.items()]}
    return seal("choice", header, {})


def open_choice(data: bytes, terms: Terms) -> Choice:
    """A choice under these terms."""

    def expected(header: dict[str, Any]) -> Expected:
        check_address(header, terms)
        return {}

    header, _ = unseal("choice", data, expected)
    return Choice(
        count(header, "number"), _told_plan(header, terms.choice.weights), count(header, "n"),
        members_told(header.get("counted"), None, "a choice"),
    )  # fmt: skip


def _told_plan(header: Mapping[str, Any], weights: Sequence[float]) -> Plan:
    """The settings of a choice, for each weight that these terms try."""
    (weight, *others) = weights
    told = header.get("settings") if others else [[weight, *_numbers(header.get("setting"), 3)]]
    rows = [_numbers(each, 4) for each in told] if isinstance(told, list) else []
    settings: dict[float, Setting] = {w: (beta, balance, tau) for w, beta, balance, tau in rows}
    taken = positive(header, "weight", zero=True) if others else weight
    if tuple(settings) != tuple(weights) or taken not in settings:
        raise InputError(f"a choice must hold beta, balance and tau for each of the weights {list(weights)}")
    return Plan(settings, taken)


def _numbers(told: Any, n: int) -> list[float]:
    """So many finite numbers, 0 or more."""
    if not isinstance(told, list) or len(told) != n:
        raise InputError("a choice must hold beta, balance and tau, and the tables behind them")
    return [positive({"setting": value}, "setting", zero=True) for value in told]


def seal_metrics(terms: Terms, client: str, number: int, accuracy: float, n_test: int) -> bytes:
    """What a client reports about its model, if it chooses to."""
    return seal("metrics", {**address(terms, client), "number": number, "accuracy": accuracy, "n_test": n_test}, {})


def open_metrics(data: bytes, terms: Terms) -> dict[str, Any]:
    """Metrics under these terms: client, number, accuracy, n_test."""

    def expected(header: dict[str, Any]) -> Expected:
        check_address(header, terms)
        return {}

    header, _ = unseal("metrics", data, expected)
    accuracy = positive(header, "accuracy", zero=True)
    if accuracy > 1 or count(header, "n_test") < 1:
        raise InputError(f"accuracy {accuracy:g} on {header['n_test']} rows reported; it is a fraction of at least one")
    return {
        "client": check_name("client", text(header, "client")), "number": count(header, "number"),
        "accuracy": accuracy, "n_test": count(header, "n_test"),
    }  # fmt: skip


def positive(header: Mapping[str, Any], name: str, *, zero: bool = False) -> float:
    """A finite number of the header, greater than 0 (or 0 too)."""
    value = header.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 1e300:
        raise InputError(f"the header's {name!r} must be a finite number; {str(value)[:40]} given")
    if value < 0 or (value == 0 and not zero):
        raise InputError(f"the header's {name!r} is {value}; it must be {'0 or more' if zero else 'positive'}")
    return float(value)


def address(terms: Terms, client: str) -> dict[str, Any]:
    """What every message of a client says first."""
    return {"federation": terms.federation, "terms": terms.digest, "client": check_name("client", client)}


def check_address(header: Mapping[str, Any], terms: Terms) -> None:
    """Refuse a message of another federation, or under other terms."""
    if text(header, "federation") != terms.federation:
        raise InputError(f"a message of federation {text(header, 'federation')[:64]!r}; this is {terms.federation!r}")
    if text(header, "terms") != terms.digest:
        raise InputError(
            f"made under other terms (digest {text(header, 'terms')[:12]}, in force {terms.digest[:12]}): "
            "a replay of another run"
        )
