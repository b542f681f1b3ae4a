"""What a federation agreed to. Its digest is in every message, and a message under other terms is refused.

A *draft* may leave the classes, the feature width and the map's width open; `settle` fixes them from what the clients
described, and from then on they stay: nobody's model changes its shape because someone came or went.

With landmarks `settle` gives an *outline*, under which clients send the moments of their normalised rows. The settled
terms name the landmarks that were drawn from the sum by their hash (`apfl.federate.landmarks`). If the normalisation is
open, *trial* terms come before the outline: under them sites try every normalisation on a narrow map
(`apfl.federate.pilot`).

With numbers or several labels as targets (``target``) class names are the names of their columns, and
`apfl.federate.numbers` says what else is different.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, lru_cache, reduce
from operator import add
from typing import Annotated, Any, Literal

import torch
from pydantic import Field, TypeAdapter, ValidationError

from apfl.data.targets import Scale, Target
from apfl.errors import InputError, printable, unknown
from apfl.federate.names import check_name
from apfl.federate.private.agreement import check_terms, outlined
from apfl.federate.wire import sha256
from apfl.maths.hits import Grid
from apfl.maths.integers import OF_ONE_LENGTH, ROOM
from apfl.maths.landmarks import ROWS_FOR_EACH_COLUMN
from apfl.maths.maps import FeatureMap
from apfl.maths.normalise import Moments, Normaliser, needs_moments, normaliser
from apfl.maths.personalise import Choice, Plan
from apfl.maths.pilot import Described
from apfl.methods import load_method
from apfl.methods._analytic import stream_maps
from apfl.methods._numbers import landmark_number
from apfl.methods._streams import PUBLIC
from apfl.methods.apfl import APFL

__all__ = [
    "FEWEST_IN_SUM",
    "FEWEST_SHARING",
    "HALF",
    "LATER_SETTINGS",
    "MOST_CLASSES",
    "Description",
    "Terms",
    "check_weights",
    "of_one_width",
    "settle",
    "trial",
]

Wire = Literal["float64", "float32"]
FORBIDDEN = ("Cc", "Cs", "Zl", "Zp")  # control characters, halves of characters, ends of lines and paragraphs
TURNING = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")  # the direction of text
AtLeastOne = Annotated[int, Field(ge=1)]
HALF = 0.5  # max_share of a new server: nobody outweighs all others together
FEWEST_SHARING = 3  # of two clients the larger always has more than half
FEWEST_LATE = 2  # with numbers as targets: of one late site, the others would learn its sums from the difference
FEWEST_IN_SUM = 3  # sites of a masked sum, unless min_cohort is larger: of two, each learns the other's part
# Every site's upload and model has a column for each class, so one site's list must not fix everyone's size. Ten times
# ImageNet's; whoever has more states them in the terms.
MOST_CLASSES = 10_000
LATER = ("max_rows", "max_share", "most_rows", "spread", "n_landmarks", "landmarks_sha256", "masked", "pilot",
         "public_sha256", "public_rows", "releases", "sigma", "target", "column_std", "target_mean",
         "target_std")  # fmt: skip
LATER_SETTINGS = {  # what terms without them mean
    "map": "random", "landmarks": "federation", "bits": 0, "weight": 1.0,
    "epsilon": "none", "delta": 1e-5, "noise": "central", "colluders": 0,
}  # fmt: skip
OF_NOISE = ("delta", "noise", "colluders", "releases")
MOST_WEIGHTS = 2**27  # width times classes: 1 GiB in an upload, in a publication, in a model


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
    max_rows: AtLeastOne | None = None  # of one client that count; None: settled by max_share
    max_share: Annotated[float, Field(gt=0, le=1)] = 1.0  # of everyone's rows that may be one client's; 1: no cap
    keep_contributions: bool = True  # whether the server keeps single uploads, or only their sum
    mean: tuple[float, ...] | None = None  # if the normalisation has one, once settled
    std: tuple[float, ...] | None = None
    fingerprints: tuple[str, str] | None = None  # of the primary and the refinement map, once settled
    most_rows: AtLeastOne | None = None  # of one client among those described: gives the integers' step, once outlined
    spread: Literal["full", "diagonal"] | None = None  # moments behind the landmarks, if any, once outlined
    n_landmarks: AtLeastOne | None = None  # once settled: those that stand clear of the others' span
    landmarks_sha256: str | None = None  # of the message with the landmarks, once settled
    pilot: tuple[tuple[str, float], ...] | None = None  # left-out hits of each normalisation tried, once outlined
    public_sha256: str | None = None  # of the file of public features that landmarks are drawn from, if they are
    public_rows: AtLeastOne | None = None  # of that file
    masked: bool = False  # whether the server only ever sees sums over sites; then it keeps no contributions either
    releases: AtLeastOne = 1  # under epsilon: noisy sums that the budget is for; one for each join, leave, late cohort
    sigma: Annotated[float, Field(gt=0)] | None = None  # under epsilon: noise of an entry of a sum, once outlined
    target: Target = "classification"  # what is predicted; otherwise class names are those of columns of Y
    column_std: tuple[float, ...] | None = None  # with such columns: of the features behind landmarks, once outlined
    target_mean: tuple[float, ...] | None = None  # likewise: of the targets, once outlined
    target_std: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        check_name("federation", self.federation)
        if not self.method.sketch:
            raise InputError(
                "terms with sketch=0 given: it would send every client the factor of the summed system, from which "
                "two members read each other's statistics. Use 1 or more columns (default 128)"
            )
        if self.numeric:
            self._check_numeric()
        elif self.landmarked:
            self._check_landmarked()
        if self.private:
            if self.masked:  # the server sees no sum that it could add noise to
                object.__setattr__(self, "method", replace(self.method, noise="shares"))
            check_terms(self)
            object.__setattr__(self, "min_per_class", 1)  # one row more must not bring a whole class with it
        if self.masked:
            self._check_masked()
            object.__setattr__(self, "keep_contributions", False)
        names = self.class_names
        check_class_names(names or ())
        least = 1 if self.numeric else 2
        if names is not None and (len(set(names)) < len(names) or len(names) < least):
            wanted = "one column" if self.numeric else "two"
            raise InputError(f"names {list(names)[:8]} given; there must be at least {wanted}, and all must differ")

    def _check_numeric(self) -> None:
        """Refuse terms that numbers and labels do not have, and those under which one site's sums would be known."""
        self.method.numbers(self.target)
        what = f"terms with target={self.target!r}"
        if self.masked:
            raise InputError(
                f"masked {what} given: masks need integers of an agreed range, which targets do not have. Start the "
                "server with --plain: it then sees what each site sends"
            )
        if self.class_names is None:
            raise InputError(f"{what} without the names of their columns given: state them (--classes price,rent)")
        if self.quorum < FEWEST_SHARING or self.min_cohort < FEWEST_LATE:
            raise InputError(
                f"{what}, quorum {self.quorum} and min_cohort {self.min_cohort} given: every member is sent the sums "
                f"over all, and could subtract its own. Allowed are a quorum of {FEWEST_SHARING} or more, and late "
                f"cohorts of {FEWEST_LATE} or more"
            )
        if self.wire != "float64":
            raise InputError(f"{what} and wire={self.wire!r} given: a small gamma needs the digits of float64")

    def _check_landmarked(self) -> None:
        method = self.method
        if (method.landmarks == PUBLIC) != (self.public_sha256 is not None and self.public_rows is not None):
            raise InputError(
                f"terms with landmarks={method.landmarks!r} and the hash of {'a' if self.public_sha256 else 'no'} file "
                "given: start the server with landmarks=FILE, and it names that file"
            )
        if method.bits == 0:
            raise InputError(
                "terms with map='landmarks' and bits=0 given: between machines statistics of landmarks are integers. "
                "Leave bits out, or give 8 to 32, or use map='random'"
            )
        if method.landmarks == "federation" and method.normalise not in (*OF_ONE_LENGTH, "auto"):
            raise InputError(
                f"terms with map='landmarks' and normalise={method.normalise!r} given: rows of any length have moments "
                f"of any size, which no agreed integers hold. Use normalise={', '.join(OF_ONE_LENGTH)} or auto, or "
                "landmarks='free'"
            )

    def _check_masked(self) -> None:
        """Refuse masked terms under which a site would have to say something by itself."""
        if not self.landmarked:
            raise InputError(
                f"masked terms with map={self.method.map!r} given: masks need integers that add up. Give "
                "map='landmarks' too, or plain terms"
            )
        stated = {"class_names": self.class_names, "n_features": self.n_features}
        lacking = [name for name, value in stated.items() if value is None]
        if lacking:
            raise InputError(
                f"masked terms without {', '.join(lacking)} given: no site describes itself under masks, so they must "
                "state the classes and the number of features"
            )
        if self.max_share != 1:
            raise InputError(
                f"masked terms with max_share={self.max_share:g} given: nobody sees a site's share of the rows. Give "
                "max_rows instead, the most rows that count of one site"
            )

    @property
    def smallest_sum(self) -> int:
        """The fewest sites in a masked sum."""
        return max(self.min_cohort, FEWEST_IN_SUM)

    @property
    def private(self) -> bool:
        """Whether nothing but noisy sums is released, and that accounted (`apfl.federate.private`)."""
        return self.method.private

    @property
    def numeric(self) -> bool:
        """Whether targets are numbers or several labels: columns of Y (`apfl.federate.numbers`)."""
        return self.target != "classification"

    @property
    def landmarked(self) -> bool:
        """Whether landmarks are drawn: one map for both streams, with statistics as integers; or part of several."""
        return self.method.map == "landmarks"

    @property
    def settled(self) -> bool:
        """Whether nothing is left open."""
        return self.fingerprints is not None

    @property
    def outlined(self) -> bool:
        """Whether all is fixed but the landmarks."""
        return self.most_rows is not None and not (self.settled or self.pilots)

    @property
    def pilots(self) -> bool:
        """Whether a pilot chooses the normalisation, before or while it does so."""
        return self.landmarked and not self.numeric and self.method.normalise == "auto"

    @property
    def trying(self) -> bool:
        """Whether these are the terms of the pilot itself."""
        return self.pilots and self.most_rows is not None

    @property
    def row_limit(self) -> int | None:
        """The most rows of one client that count: the cap, and what the range of the integers has room for."""
        room = None if self.most_rows is None or self.numeric else int(ROOM * self.most_rows)
        return min((limit for limit in (self.max_rows, room) if limit is not None), default=None)

    @property
    def bits(self) -> int:
        """Of an entry of the statistics; 0: they travel as they are. Settled terms know."""
        return 0 if self.method.bits == "auto" else self.method.bits

    @property
    def n_in(self) -> int:
        """Columns of normalised rows."""
        return self.normaliser().width(self.n_features or 0)

    @property
    def n_classes(self) -> int:
        return len(self.class_names or ())

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.wire == "float64" else torch.float32

    @property
    def published_dtype(self) -> torch.dtype:
        """Of the primary and the sketch: 16 bits (`to_columns`) with landmarks, whose sums are rounded far more."""
        return torch.int16 if self.landmarked else self.dtype

    @property
    def choice(self) -> Choice:
        """The refinement's settings."""
        return self.method.choice

    @property
    def wants_tables(self) -> bool:
        """Whether clients send tables of left-out hits."""
        return self.choice.open and self.choice.scope != "client" and not self.numeric

    @property
    def wants_leverage(self) -> bool:
        """Whether clients need the leverage of the primary."""
        return self.choice.open

    @property
    def width(self) -> int:
        """Columns of Phi."""
        if self.numeric:  # the widest map: a constant, the features, landmarks
            return 1 + (self.n_features or 0) + (self.n_landmarks or 0)
        if self.landmarked:
            return self.n_landmarks or int(self.method.d_primary)
        return int(self.method.d_primary) + self.method.intercept

    @property
    def refinement_width(self) -> int:
        """Columns of Psi."""
        return self.width if self.landmarked else int(self.method.d_refinement) + self.method.intercept

    @cached_property
    def digest(self) -> str:
        """SHA-256 over all of it."""
        return sha256(self.to_json().encode())

    @property
    def digest_but_masks(self) -> str:
        """SHA-256 over all but whether there are masks; of plain terms it is `digest`."""
        told = {key: value for key, value in json.loads(self.to_json()).items() if key != "masked"}
        return sha256(json.dumps(told, sort_keys=True).encode())

    def normaliser(self) -> Normaliser:
        """The scaling that all clients use; with columns as targets, that of what landmarks are compared with."""
        if self.numeric:
            mean, std = (torch.tensor(each, dtype=torch.float64) for each in (self.mean or (), self.column_std or ()))
            return Normaliser("columns", mean, std)
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

    def refinement_map(self, like: torch.Tensor, scaling: Normaliser) -> FeatureMap:
        """The refinement map of features that are scaled in another way than was agreed."""
        if scaling.width(self.n_features or 0) == self.normaliser().width(self.n_features or 0):
            return self.maps(like)[1]
        m = self.method
        d, activation = int(m.d_refinement), m.activation_refinement
        return stream_maps(like, scaling, (1, d), ("identity", activation), self.seed, m.intercept)[1]

    def grid(self, unit: float) -> Grid:
        """The settings that tables count hits for; ``unit`` comes with the publication."""
        return self.choice.grid(unit)

    def fixed_plan(self, unit: float) -> Plan:
        """The settings, if none is open."""
        tried, (weight, *_) = self.grid(unit), self.choice.weights
        return Plan({weight: (tried.betas[0], tried.balances[0], tried.taus[0])}, weight)

    @property
    def table_shape(self) -> tuple[int, ...]:
        """Of a table of left-out hits: one for each weight on the primary, if several are tried."""
        n_weights = len(self.choice.weights)
        return self.grid(1.0).shape if n_weights == 1 else (n_weights, *self.grid(1.0).shape)

    def by_weight(self, table: torch.Tensor) -> dict[float, torch.Tensor]:
        """Such a table, or a sum of them, as one for each weight."""
        return dict(zip(self.choice.weights, table.view(-1, *self.grid(1.0).shape), strict=True))

    def departs_from(self, draft: Terms) -> str | None:
        """The first thing that the draft had fixed and these terms have otherwise; None if they settle it."""
        own, former = asdict(self), asdict(draft)
        own |= own.pop("method")
        former |= former.pop("method")
        filled_in = {"d_primary": "auto", "d_refinement": "auto", "normalise": "auto", "bits": "auto"}
        return next(
            (key for key, was in former.items() if was not in (None, own[key]) and filled_in.get(key) != was), None
        )

    def to_json(self) -> str:
        """The terms as they travel and are stored.

        Without what came later and is not set: terms of before there was such a thing keep their digest.
        """
        stated = OF_NOISE if self.private else ()  # whoever reads the terms must find them there
        unset = {name: getattr(Terms, name) for name in LATER if name not in stated}
        values = {name: value for name, value in asdict(self).items() if name not in unset or value != unset[name]}
        later = {key: value for key, value in LATER_SETTINGS.items() if key not in stated}
        values["method"] = {key: value for key, value in values["method"].items() if later.get(key) != value}
        return json.dumps(values, sort_keys=True, allow_nan=False)

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
            if not problem["loc"]:  # a check of our own, which says it all
                raise InputError(problem["msg"].removeprefix("Value error, ")) from error
            key = ".".join(str(part) for part in problem["loc"])
            raise InputError(f"terms: {key}={str(problem['input'])[:60]!r}: {problem['msg']}") from error


@lru_cache(maxsize=16)  # every message comes with the terms, and they are almost always the same
def _parsed(text: str | bytes) -> Terms:
    try:
        given = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"terms that are no JSON ({type(error).__name__}); get them again from the server") from error
    if isinstance(given, dict) and isinstance(given.get("method"), dict):
        given["method"] = LATER_SETTINGS | given["method"]
    return Terms.checked(given)


@dataclass(frozen=True)
class Description:
    """What a client says about itself before anything is agreed."""

    client: str
    n_samples: int  # rows that it would contribute
    n_features: int
    class_names: tuple[str, ...]  # of those rows
    moments: Moments | None = None  # if the normalisation needs them
    described: Described | None = None  # instead of them, if a pilot chooses the normalisation
    unsuited: tuple[str, ...] = ()  # normalisations under which one of its rows drowns the others
    targets: Moments | None = None  # sums and squares of the columns of Y, if targets are columns

    def behind(self, how: str) -> Moments | None:
        """The moments that a normalisation is made from."""
        return self.moments if self.described is None else self.described.behind(how)


def of_one_width(draft: Terms, described: Sequence[Description]) -> tuple[list[Description], list[Description]]:
    """The descriptions of the width that most clients have, and the others: the first to describe does not decide."""
    votes = Counter(each.n_features for each in described)
    (width, most), *others = votes.most_common()
    if draft.n_features is not None:
        width = draft.n_features
    elif others and others[0][1] == most:
        told = "; ".join(
            f"{n} at {', '.join(each.client for each in described if each.n_features == n)}" for n in sorted(votes)
        )
        raise InputError(
            f"features of different widths ({printable(told)}), and none that most clients have: all sites must use "
            "the same backbone. Run again when more sites are connected, or take the odd ones out (apfl federate leave)"
        )
    kept = [each for each in described if each.n_features == width]
    return kept, [each for each in described if each.n_features != width]


def settle(draft: Terms, described: Sequence[Description], how: str | None = None) -> Terms:
    """The draft with everything fixed that it left open: the same for the same descriptions in any order.

    ``how`` is the normalisation that a pilot chose. With landmarks it is an outline: they are still to be drawn.
    """
    base, counted = _common(draft, described)
    if draft.private:
        return outlined(base)
    if draft.numeric:
        return _numeric_outline(base, described, counted)
    how, n_features = how or draft.method.normalise, base.n_features or 0
    d_primary, d_refinement = draft.method.widths(sum(counted), n_features)
    check_weights(d_primary, base.n_classes)
    shared = normaliser(how, _summed(described, how) if needs_moments(how) else None)
    bits = draft.method.integers(counted, d_primary)
    method = replace(draft.method, d_primary=d_primary, d_refinement=d_refinement, normalise=shared.how, bits=bits)
    terms = replace(base, method=method)
    if shared.mean is not None and shared.std is not None:
        terms = replace(terms, mean=tuple(shared.mean.tolist()), std=tuple(shared.std.tolist()))
    if terms.landmarked:
        return _outline(terms, counted)
    primary, refinement = terms._draw(torch.zeros(1, 1))
    return replace(terms, fingerprints=(primary.fingerprint, refinement.fingerprint))


def trial(draft: Terms, described: Sequence[Description]) -> tuple[Terms, int]:
    """The terms of a pilot, whose normalisation and width are open still, and how many rows count of all clients."""
    base, counted = _common(draft, described)
    return replace(base, most_rows=max(counted)), sum(counted)


def _common(draft: Terms, described: Sequence[Description]) -> tuple[Terms, list[int]]:
    """The draft with classes, features and the cap fixed, and the rows of each client that count."""
    if not described:
        raise InputError("nobody has described its rows yet, so the terms cannot be settled")
    n_features = draft.n_features or described[0].n_features
    odd = [each for each in described if each.n_features != n_features]
    if odd:
        raise InputError(
            f"features of width {odd[0].n_features} at {odd[0].client}, of width {n_features} elsewhere: "
            "all sites must use the same backbone"
        )
    names, cap = draft.class_names or _classes(described), draft.max_rows or _cap(draft, described)
    counted = [min(each.n_samples, cap or each.n_samples) for each in described]
    return replace(draft, class_names=names, n_features=n_features, max_rows=cap), counted


def _numeric_outline(base: Terms, described: Sequence[Description], counted: Sequence[int]) -> Terms:
    """Terms that lack only their landmarks: the scales of features and of targets, from everyone's moments."""
    features, n = _summed(described, "standardise"), sum(counted)
    standard, columns = normaliser("standardise", features), normaliser("columns", features)
    targets = Scale.of_sums(*_summed_targets(described))
    method, n_features = base.method, base.n_features or 0
    d = landmark_number(n, n_features) if method.d_primary == "auto" else method.d_primary
    check_weights(1 + n_features + d, base.n_classes)
    assert standard.mean is not None
    assert standard.std is not None
    assert columns.std is not None
    base = replace(
        base, method=replace(method, d_primary=d), mean=tuple(standard.mean.tolist()), std=tuple(standard.std.tolist()),
        column_std=tuple(columns.std.tolist()), target_mean=tuple(targets.mean.tolist()),
        target_std=tuple(targets.std.tolist()),
    )  # fmt: skip
    return _outline(base, counted)


def _summed_targets(described: Sequence[Description]) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Rows, sums and sums of squares of the targets, added in the order of the clients' names."""
    found = [each.targets for each in sorted(described, key=lambda each: each.client) if each.targets is not None]
    assert len(found) == len(described), "a description under such a draft has the targets' moments"
    return (
        sum(each.n_samples for each in found), reduce(add, (each.sums for each in found)),
        reduce(add, (each.squares for each in found)),
    )  # fmt: skip


def _outline(terms: Terms, counted: Sequence[int]) -> Terms:
    """Terms that lack only their landmarks, from the rows of each client that count."""
    terms = replace(terms, most_rows=max(counted))
    if terms.method.landmarks != "federation":
        return terms
    return replace(terms, spread="full" if sum(counted) >= ROWS_FOR_EACH_COLUMN * terms.n_in else "diagonal")


def _classes(described: Sequence[Description]) -> tuple[str, ...]:
    """All classes that the clients describe, sorted."""
    names = tuple(sorted({name for each in described for name in each.class_names}))
    if len(names) < 2:
        raise InputError(f"the clients have {len(names)} classes among them ({', '.join(names)}); two are needed")
    if len(names) > MOST_CLASSES:
        most = max(described, key=lambda each: len(each.class_names))
        raise InputError(
            f"the clients have {len(names)} classes among them, {len(most.class_names)} of them at {most.client}; "
            f"allowed are {MOST_CLASSES}. Take that site out (apfl federate leave), or state the classes in the terms"
        )
    return names


def _cap(draft: Terms, described: Sequence[Description]) -> int | None:
    """The most rows of one client by ``max_share``, which must leave room for a client with hardly any rows.

    With k clients and a share below 1/(k - 1), the others cannot have all rows among them: the smallest description
    would set everyone's cap, however few rows it has.
    """
    k = len(described)
    if k >= FEWEST_SHARING and draft.max_share * (k - 1) < 1:
        raise InputError(
            f"max_share {draft.max_share:g} given, and {k} clients: the one with the fewest rows would decide how many "
            f"count of everyone. Allowed is {math.ceil(1000 / (k - 1)) / 1000:g} or more with {k} clients; run again "
            "when more are connected, or start a new folder with a larger --max-share, or with --max-rows"
        )
    return rows_of_share([each.n_samples for each in described], draft.max_share)


def check_weights(width: int, n_classes: int) -> None:
    """Refuse a primary that is larger than a message may be."""
    if width * n_classes > MOST_WEIGHTS:
        raise InputError(
            f"a primary of {width} columns and {n_classes} classes has {width * n_classes} weights; allowed are "
            f"{MOST_WEIGHTS}. State a smaller d_primary, or fewer classes, in the terms of a new folder"
        )


def rows_of_share(described: Sequence[int], share: float) -> int | None:
    """How many rows one client may contribute so that none has more than ``share`` of all; None if there is no cap.

    The largest c <= share * (sum over clients of min(n, c)). Two clients have no cap.

    >>> rows_of_share([100, 100, 5000], 0.5), rows_of_share([100, 100, 100], 0.5), rows_of_share([100, 5000], 0.5)
    (200, 300, None)
    """
    if share == 1 or len(described) < FEWEST_SHARING:
        return None
    rows = sorted(described, reverse=True)
    if rows[0] <= share * sum(rows):
        return int(share * sum(rows) / (1 - share))  # of one who comes later
    for capped in range(1, len(rows)):
        cap = share * sum(rows[capped:]) / (1 - share * capped)  # c = share * (capped * c + the others' rows)
        if rows[capped] <= cap:
            return max(int(cap), 1)
    return rows[-1]  # a share of less than one in so many: all alike


def check_class_names(names: Sequence[str]) -> None:
    """Refuse names with characters that act on a terminal, end a line, turn its direction, or cannot be written."""
    for name in names:
        if any(unicodedata.category(each) in FORBIDDEN or each in TURNING for each in name):
            raise InputError(f"class name {printable(name)!r} given; it must have no control characters")


def _summed(described: Sequence[Description], how: str) -> Moments:
    """The federation's moments, added in the order of the clients' names."""
    behind = [each.behind(how) for each in sorted(described, key=lambda each: each.client)]
    found = [each for each in behind if each is not None]
    if len(found) < len(described):
        raise InputError("this normalisation needs the moments of every client")
    return reduce(add, found)
