"""The cells of a plan: every combination of its lists, each a method on a federation with a seed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import product
from typing import Annotated, Any, NamedTuple, get_type_hints

from pydantic import BaseModel, Field, create_model

from apfl.data.partition import PARTITIONS, options_of
from apfl.data.protocol import Protocol
from apfl.errors import InputError, unknown
from apfl.experiments.plan import STRICT, Plan, tables_of, validated
from apfl.experiments.record import Files, user_files, with_hashes
from apfl.experiments.seeds import SEED, SEEDS, Seed, Seeds
from apfl.experiments.tuning import combinations, own_axes
from apfl.methods import METHODS, Method, load_method, method_class
from apfl.methods._training import Training

__all__ = ["Cell", "cells"]

Axes = Mapping[str, Sequence[Any]]  # the values to try, by setting


@dataclass(frozen=True)
class Cell:
    """One method, one federation, one seed. ``tune`` holds the axes of its grid, ``tuning_seed`` on which draw."""

    name: str
    method: Method
    protocol: Protocol
    seed: int
    threads: int
    tune: Axes | None = None
    tuning_seed: int = 0
    oracle: bool = False  # the best settings on the test rows instead of the method's own choice
    files: Files = field(default_factory=dict)  # of the user's own, as they were when the plan was checked

    def key(self, data: str | None, device: str) -> str:
        """A readable name, and a hash of all that decides the result."""
        what = [self._what(data, device), self.seed, [self.tune, self.tuning_seed] if self.tune else None]
        what += [self.oracle] if self.oracle else []
        return f"{self.label}-seed{self.seed}-{_digest(what)}"

    def tuning_key(self, data: str | None, device: str) -> str:
        """The same for its tuning, which all seeds share."""
        return f"{self.label}-{_digest([self._what(data, device), self.tune, self.tuning_seed])}"

    @property
    def row(self) -> str:
        """What it is called in records: settings found on test rows are not the method's own."""
        return f"{self.name}_oracle" if self.oracle else self.name

    @property
    def label(self) -> str:
        """Method and federation in a few characters."""
        partition = self.protocol.partition
        spread = f"-{self.protocol.alpha:g}" if "alpha" in options_of(partition) else ""
        return f"{self.row}-{self.protocol.n_clients or 'given'}-{PARTITIONS.name_of(partition)}{spread}"

    def _what(self, data: str | None, device: str) -> list[Any]:
        what = [data, device, self.threads, self.name, asdict(self.method), asdict(self.protocol)]
        return with_hashes(what, self.files)


def cells(plan: Plan) -> list[Cell]:
    """Every cell of the plan, each once: federation by federation, seed by seed, method by method."""
    variants = [
        variant._replace(name=name)
        for name, given in METHODS.by_name(plan.methods).items()
        for table in tables_of(plan.methods[given])
        for variant in _variants(given, table, plan)
    ]
    seeds = dict.fromkeys(seed for variant in variants for seed in variant.seeds)
    protocols = [protocol for table in tables_of(plan.protocol) for protocol in _protocols(table)]
    by_key: dict[str, Cell] = {}
    for protocol, seed, variant in product(protocols, seeds, variants):
        if seed in variant.seeds:
            _check_late(variant.name, variant.method, protocol)
            cell = variant.cell(protocol, seed, plan.threads)
            by_key.setdefault(cell.key(None, ""), cell)
    return list(by_key.values())


def _check_late(name: str, method: Method, protocol: Protocol) -> None:
    if protocol.unseen_clients and method.personal and not method.admits:
        raise InputError(f"method {name} has no model for clients unseen in training; leave it out of this plan")


class _Variant(NamedTuple):
    """One combination of a method's settings, as the plan has it."""

    name: str
    method: Method
    axes: Axes | None  # what is tuned
    seeds: Sequence[int]
    tuning_seed: int
    oracle: bool = False

    def cell(self, protocol: Protocol, seed: int, threads: int) -> Cell:
        files = user_files(self.method, protocol)
        return Cell(self.name, self.method, protocol, seed, threads, self.axes, self.tuning_seed, self.oracle, files)


def _variants(name: str, table: Mapping[str, Any], plan: Plan) -> Iterator[_Variant]:
    """Every combination of a table's settings; where it is asked for, each also as an oracle."""
    options, settings = _options_and_settings(name, table)
    seeds = options.seeds or plan.seeds
    tuning_seed = seeds[0] if options.tuning_seed is None else options.tuning_seed
    for combination in _combinations(settings, f"methods.{name}"):
        method = load_method(name, **combination)
        axes = _axes(method, settings, options.tune)
        _check_axes(name, method, axes, settings, options.tune)
        method, axes = _shortened(method, axes, plan.rounds)
        variant = _Variant(name, method, axes, seeds, tuning_seed)
        yield variant
        if options.oracle:
            if name != "apfl" or axes:
                raise InputError(f"oracle is for apfl alone, and not together with tune; leave it out of {name}")
            yield variant._replace(axes=None, oracle=True)


def _options_and_settings(name: str, table: Mapping[str, Any]) -> tuple[_MethodOptions, dict[str, Any]]:
    """What a table says of how to run the method, and the method's own settings; another key is refused."""
    how = {key: value for key, value in table.items() if key in _MethodOptions.model_fields}
    settings = {key: value for key, value in table.items() if key not in how}
    known = [each.name for each in fields(method_class(name))]
    options = validated(_MethodOptions, how, name)
    for key in settings:
        if key not in known:
            raise unknown(f"setting of {name}", key, [*known, *_MethodOptions.model_fields])
    return options, settings


def _axes(method: Method, settings: Mapping[str, Any], tune: bool | Axes) -> Axes | None:
    """The grid that is given, or the method's own; what the plan says of the normalisation stands."""
    if isinstance(tune, bool):
        own = own_axes(method) if tune else None
        return own and {key: own[key] for key in own if key != "normalise" or key not in settings}
    return tune


def _shortened(method: Method, axes: Axes | None, rounds: int | None) -> tuple[Method, Axes | None]:
    """With this many rounds, and no more fine-tuning than they train: 100 epochs would be nearly all of a trial."""
    if rounds is None or not isinstance(method, Training):
        return method, axes
    most = rounds * method.epochs
    changes: dict[str, Any] = {"n_rounds": rounds}
    if method.finetune_epochs > most:
        changes["finetune_epochs"] = most
    bounded = {
        key: sorted({min(value, most) for value in values}) if key == "finetune_epochs" else values
        for key, values in (axes or {}).items()
    }
    return replace(method, **changes), bounded or None


def _check_axes(name: str, method: Method, axes: Axes | None, settings: Mapping[str, Any], tune: Any) -> None:
    if tune and not axes:
        raise InputError(f"{name} has nothing to tune by itself; give a grid: tune = {{SETTING = [VALUE, VALUE]}}")
    for key, values in (axes or {}).items():
        if key in settings:
            raise InputError(f"{name}.{key} is both given and tuned; leave one of them out")
        for value in values:
            load_method(name, **(asdict(method) | {key: value}))


class _MethodOptions(BaseModel):
    model_config = STRICT

    tune: bool | Annotated[dict[str, Annotated[list[Any], Field(min_length=1)]], Field(min_length=1)] = Field(
        False, description="true, false, or lists of values to try: {SETTING = [VALUE, VALUE]}"
    )
    tuning_seed: Seed | None = Field(None, description=SEED)  # its first seed, unless the command line gives others
    seeds: Seeds | None = Field(None, description=SEEDS)
    oracle: bool = False  # beside the method, its best settings on the test rows


def _protocols(table: Mapping[str, Any]) -> Iterator[Protocol]:
    hints = get_type_hints(Protocol)
    known: dict[str, Any] = {key: (hint | list[hint], None) for key, hint in hints.items()}  # type: ignore[valid-type]
    valid = validated(create_model("protocol", __config__=STRICT, **known), table, "protocol")
    for combination in _combinations(valid.model_dump(exclude_unset=True), "protocol"):  # 1 is 1.0 from here on
        if combination.get("partition") == "given":
            combination.setdefault("n_clients", None)
        yield Protocol(**combination)


def _combinations(table: Mapping[str, Any], where: str) -> Iterator[dict[str, Any]]:
    """A list means a sweep: every combination of its entries with those of the other lists."""
    axes = {key: value if isinstance(value, list) else [value] for key, value in table.items()}
    for key, axis in axes.items():
        if not axis:
            raise InputError(f"{where}.{key} is an empty list; a sweep needs at least one value")
    return combinations(axes)


def _digest(what: Any) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:10]
