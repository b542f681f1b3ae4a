"""What a federation agreed to. Its digest is in every message, and a message under other terms is refused.

A *draft* may leave the classes, the feature width and the map's width open; `settle` fixes them from what the clients
described, and from then on they stay: nobody's model changes its shape because someone came or went.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, TypeAdapter, ValidationError

from apfl.errors import InputError, unknown
from apfl.federate.wire import sha256
from apfl.maths.hits import Grid
from apfl.maths.maps import FeatureMap
from apfl.maths.normalise import Moments, Normaliser, needs_moments, normaliser
from apfl.maths.personalise import Choice
from apfl.methods import load_method
from apfl.methods._analytic import stream_maps
from apfl.methods.apfl import APFL

__all__ = ["Description", "Terms", "check_name", "settle"]

Wire = Literal["float64", "float32"]
AtLeastOne = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class Terms:
    """The agreement of a federation.

    >>> draft = Terms("three-sites", method=APFL(d_primary=256))
    >>> draft.settled, Terms.from_json(draft.to_json()) == draft
    (False, True)
    """

    federation: str
    class_names: tuple[str, ...] | None = None  # None: all that the clients describe, sorted
    n_features: AtLeastOne | None = None  # None: what the clients describe
    method: APFL = field(default_factory=APFL)  # widths, ridges, what is chosen and how
    seed: Annotated[int, Field(ge=0, lt=2**62)] = 0  # of both maps and of the leverage sketch
    wire: Wire = "float64"  # precision of what travels
    min_per_class: AtLeastOne = 2  # a class with fewer rows at a client is withheld from its upload
    quorum: AtLeastOne = 2  # clients that must have contributed before anything is published
    min_cohort: AtLeastOne = 1  # late clients are folded in by at least so many at a time
    keep_contributions: bool = True  # whether the server keeps single uploads, or only their sum
    mean: tuple[float, ...] | None = None  # if the normalisation has one, once settled
    std: tuple[float, ...] | None = None
    fingerprints: tuple[str, str] | None = None  # of the primary and the refinement map, once settled

    def __post_init__(self) -> None:
        check_name("federation", self.federation)
        if not self.method.sketch:
            raise InputError(
                "terms with sketch=0 given: it would send every client the factor of the summed system, from which "
                "two members read each other's statistics. Use 1 or more columns (default 128)"
            )
        names = self.class_names
        if names is not None and (len(set(names)) < len(names) or len(names) < 2):
            raise InputError(f"class names {list(names)[:8]} given; there must be at least two, and all must differ")

    @property
    def settled(self) -> bool:
        """Whether nothing is left open."""
        return self.fingerprints is not None

    @property
    def n_classes(self) -> int:
        return len(self.class_names or ())

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.wire == "float64" else torch.float32

    @property
    def choice(self) -> Choice:
        """The refinement's settings."""
        return self.method.choice

    @property
    def wants_tables(self) -> bool:
        """Whether clients send tables of left-out hits."""
        return self.choice.open and self.method.scope != "client"

    @property
    def wants_leverage(self) -> bool:
        """Whether clients need the leverage of the primary."""
        return self.choice.open

    @property
    def width(self) -> int:
        """Columns of Phi."""
        return int(self.method.d_primary) + self.method.intercept

    @property
    def refinement_width(self) -> int:
        """Columns of Psi."""
        return int(self.method.d_refinement) + self.method.intercept

    @cached_property
    def digest(self) -> str:
        """SHA-256 over all of it."""
        return sha256(self.to_json().encode())

    def normaliser(self) -> Normaliser:
        """The scaling that all clients use."""
        how = self.method.normalise
        if not needs_moments(how):
            return normaliser(how)
        mean, std = (torch.tensor(values, dtype=torch.float64) for values in (self.mean or (), self.std or ()))
        return Normaliser(how, mean, std)  # type: ignore[arg-type]  # settled terms have no auto

    def maps(self, like: torch.Tensor) -> tuple[FeatureMap, FeatureMap]:
        """Both maps, drawn here in the dtype of ``like`` and checked against the fingerprints."""
        drawn = self._draw(like)
        for own, agreed in zip((each.fingerprint for each in drawn), self.fingerprints or (), strict=True):
            if own != agreed:
                raise InputError(
                    f"the random map of seed {self.seed} comes out differently here (fingerprint {own[:12]}, agreed "
                    f"{agreed[:12]}): compare the versions of numpy and scipy with those of the server"
                )
        return drawn

    def _draw(self, like: torch.Tensor) -> tuple[FeatureMap, FeatureMap]:
        m = self.method
        widths = (int(m.d_primary), int(m.d_refinement))
        row = like.new_zeros(1, self.n_features or 0)
        activations = (m.activation_primary, m.activation_refinement)
        return stream_maps(row, self.normaliser(), widths, activations, self.seed, m.intercept)

    def grid(self, unit: float) -> Grid:
        """The settings that tables count hits for; ``unit`` comes with the publication."""
        return self.choice.grid(unit)

    def departs_from(self, draft: Terms) -> str | None:
        """The first thing that the draft had fixed and these terms have otherwise; None if they settle it."""
        own, former = asdict(self), asdict(draft)
        own |= own.pop("method")
        former |= former.pop("method")
        filled_in = {"d_primary": "auto", "d_refinement": "auto", "normalise": "auto"}
        return next(
            (key for key, was in former.items() if was not in (None, own[key]) and filled_in.get(key) != was), None
        )

    def to_json(self) -> str:
        """The terms as they travel and are stored."""
        return json.dumps(asdict(self), sort_keys=True, allow_nan=False)

    @staticmethod
    def from_json(text: str | bytes) -> Terms:
        """The terms back, every field checked."""
        return _parsed(text)

    @staticmethod
    def checked(given: Any) -> Terms:
        """Terms from plain values, as a file or a command line gives them."""
        if not isinstance(given, dict) or not isinstance(given.get("method", {}), dict):
            raise InputError("terms must be a table of settings, with 'method' a table of its own")
        known = [each.name for each in fields(Terms)]
        for key in given:
            if key not in known:
                raise unknown("term of a federation", str(key), known)
        method = load_method("apfl", **given.get("method", {}))
        try:
            return TypeAdapter(Terms).validate_python({**given, "method": method})
        except ValidationError as error:
            problem = error.errors()[0]
            key = ".".join(str(part) for part in problem["loc"])
            raise InputError(f"terms: {key}={str(problem['input'])[:60]!r}: {problem['msg']}") from error


@lru_cache(maxsize=16)  # every message comes with the terms, and they are almost always the same
def _parsed(text: str | bytes) -> Terms:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"terms that are no JSON ({type(error).__name__}); get them again from the server") from error
    return Terms.checked(given)


@dataclass(frozen=True)
class Description:
    """What a client says about itself before anything is agreed."""

    client: str
    n_samples: int  # rows that it would contribute
    n_features: int
    class_names: tuple[str, ...]  # of those rows
    moments: Moments | None = None  # if the normalisation needs them


def settle(draft: Terms, described: Sequence[Description]) -> Terms:
    """The draft with everything fixed that it left open: the same for the same descriptions in any order."""
    if not described:
        raise InputError("nobody has described its rows yet, so the terms cannot be settled")
    n_features = draft.n_features or described[0].n_features
    odd = [each for each in described if each.n_features != n_features]
    if odd:
        raise InputError(
            f"features of width {odd[0].n_features} at {odd[0].client}, of width {n_features} elsewhere: "
            "all sites must use the same backbone"
        )
    names = draft.class_names or tuple(sorted({name for each in described for name in each.class_names}))
    if len(names) < 2:
        raise InputError(f"the clients have {len(names)} classes among them ({', '.join(names)}); two are needed")
    method = draft.method
    d_primary, d_refinement = method.widths(sum(each.n_samples for each in described), n_features)
    shared = normaliser(method.normalise, _summed(described) if needs_moments(method.normalise) else None)
    method = replace(method, d_primary=d_primary, d_refinement=d_refinement, normalise=shared.how)
    terms = replace(draft, class_names=names, n_features=n_features, method=method)
    if shared.mean is not None and shared.std is not None:
        terms = replace(terms, mean=tuple(shared.mean.tolist()), std=tuple(shared.std.tolist()))
    primary, refinement = terms._draw(torch.zeros(1, 1))
    return replace(terms, fingerprints=(primary.fingerprint, refinement.fingerprint))


def check_name(what: str, name: str) -> str:
    """A name that can stand in a path and on one line of a terminal."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name):
        raise InputError(
            f"{what} name {name[:80]!r} given; allowed are up to 64 letters, digits, '.', '_' and '-', "
            "beginning with a letter or digit"
        )
    return name


def _summed(described: Sequence[Description]) -> Moments:
    """The federation's moments, added in the order of the clients' names."""
    found = [each.moments for each in sorted(described, key=lambda each: each.client) if each.moments is not None]
    if len(found) < len(described):
        raise InputError("this normalisation needs the moments of every client")
    summed = found[0]
    for each in found[1:]:
        summed = summed + each
    return summed
