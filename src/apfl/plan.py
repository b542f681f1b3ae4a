"""A plan: what to run, in a TOML file. A list means a sweep; everything is checked before anything runs.

data = "cifar100"                 # or a file; --data takes another
backbone = "vit-mae-base"         # for images
seeds = [0, 1, 2]

[protocol]                        # or several [[protocol]], each with its own sweep
n_clients = [50, 100]
alpha = [0.1, 0.5, 1.0]

[methods.apfl]
[methods.fedavg]                  # or several [[methods.fedavg]]
n_rounds = 200
tune = true                       # or a grid: tune = {lr = [0.01, 0.1]}
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import product
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from apfl.errors import InputError, unknown
from apfl.federation import Method
from apfl.methods import load_method, method_class
from apfl.methods._training import Training
from apfl.protocol import Protocol

__all__ = ["Cell", "Plan", "cells", "read_plan", "to_toml"]

Seeds = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
T = TypeVar("T", bound=BaseModel)
SOURCE = (
    "data", "backbone", "pooling", "revision", "backbone_revision", "splits",
    "image_column", "label_column", "feature_column",
)  # fmt: skip
STRICT = ConfigDict(extra="forbid", strict=True, frozen=True)


class Plan(BaseModel):
    """What a plan says, key by key; the fields are the only home of the defaults."""

    model_config = STRICT

    title: str = ""
    data: str = "digits"
    backbone: str | None = None
    pooling: str | None = None
    revision: str | None = None
    backbone_revision: str | None = None
    splits: str | None = None
    image_column: str | None = None
    label_column: str | None = None
    feature_column: str | None = None
    seeds: Seeds = [0, 1, 2]
    threads: Annotated[int, Field(ge=1)] = 1  # of torch and BLAS, for each cell: another number may round differently
    checkpoint_seconds: Annotated[float, Field(ge=0)] = 60
    protocol: dict[str, Any] | list[dict[str, Any]] = Field(default_factory=dict)
    methods: Annotated[dict[str, dict[str, Any] | list[dict[str, Any]]], Field(min_length=1)]

    @property
    def source(self) -> dict[str, Any]:
        """Where the data come from: what `load_data` is called with."""
        return {name: getattr(self, name) for name in SOURCE if getattr(self, name) is not None}


@dataclass(frozen=True)
class Cell:
    """One method, one federation, one seed. ``tune`` holds the axes of its grid, ``tuning_seed`` on which draw."""

    name: str
    method: Method
    protocol: Protocol
    seed: int
    threads: int
    tune: Mapping[str, Sequence[Any]] | None = None
    tuning_seed: int = 0
    oracle: bool = False  # the best settings on the test rows instead of the method's own choice

    def key(self, data: str | None, device: str) -> str:
        """A readable name, and a hash of all that decides the result."""
        what = [self._what(data, device), self.seed, [self.tune, self.tuning_seed] if self.tune else None]
        what += [self.oracle] if self.oracle else []
        return f"{self.label}-seed{self.seed}-{_digest(what)}"

    def tuning_key(self, data: str | None, device: str) -> str:
        """The same for its tuning, which all seeds share."""
        return f"{self.label}-{_digest([self._what(data, device), self.tune, self.tuning_seed])}"

    @property
    def label(self) -> str:
        """Method and federation in a few characters."""
        spread = f"-{self.protocol.alpha:g}" if self.protocol.partition.startswith("dirichlet") else ""
        name = f"{self.name}_oracle" if self.oracle else self.name
        return f"{name}-{self.protocol.n_clients or 'given'}-{self.protocol.partition}{spread}"

    def _what(self, data: str | None, device: str) -> list[Any]:
        return [data, device, self.threads, self.name, asdict(self.method), asdict(self.protocol)]  # type: ignore[call-overload]


def read_plan(
    path: Path,
    *,
    source: Mapping[str, Any] | None = None,
    rounds: int | None = None,
    only: Sequence[str] | None = None,
    **overrides: Any,
) -> Plan:
    """The plan in a file, with some keys replaced (those that are not None).

    ``source`` replaces all that the plan says about its data, ``rounds`` replaces ``n_rounds`` of the gradient
    methods, ``only`` names the methods to keep.
    """
    try:
        given = tomllib.loads(path.read_text())
    except OSError as error:
        raise InputError(f"cannot read the plan {path}: {error.strerror}; see experiments/ for some") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not TOML: {error}") from error
    if source is not None:
        given = {key: value for key, value in given.items() if key not in SOURCE} | dict(source)
    given |= {key: value for key, value in overrides.items() if value is not None}
    plan = _validated(Plan, given, "plan")
    for name in only or ():
        if name not in plan.methods:
            raise unknown("method in the plan", name, plan.methods)
    kept = {name: tables for name, tables in plan.methods.items() if only is None or name in only}
    if rounds is not None:
        kept = {name: _with_rounds(name, tables, rounds) for name, tables in kept.items()}
    return plan.model_copy(update={"methods": kept})


def _with_rounds(
    name: str, tables: dict[str, Any] | list[dict[str, Any]], rounds: int
) -> dict[str, Any] | list[dict[str, Any]]:
    if not issubclass(method_class(name), Training):
        return tables
    changed = [table | {"n_rounds": rounds} for table in _tables(tables)]
    return changed if isinstance(tables, list) else changed[0]


def cells(plan: Plan) -> list[Cell]:
    """Every cell of the plan, each once: federation by federation, seed by seed, method by method."""
    variants = [
        (name, *variant)
        for name, tables in plan.methods.items()
        for table in _tables(tables)
        for variant in _variants(name, table, plan)
    ]
    found: dict[str, Cell] = {}
    for protocol in [each for table in _tables(plan.protocol) for each in _protocols(table)]:
        for seed in dict.fromkeys(seed for *_, seeds, _ in variants for seed in seeds):
            for name, method, tune, seeds, oracle in variants:
                if seed in seeds:
                    _check_late(name, protocol)
                    cell = Cell(name, method, protocol, seed, plan.threads, tune, seeds[0], oracle)
                    found.setdefault(cell.key(None, ""), cell)
    return list(found.values())


def _check_late(name: str, protocol: Protocol) -> None:
    cls = method_class(name)
    if protocol.unseen_clients and cls.personal and not getattr(cls, "admits", False):
        raise InputError(f"method {name} has no model for clients unseen in training; leave it out of this plan")


def _variants(
    name: str, table: Mapping[str, Any], plan: Plan
) -> Iterator[tuple[Method, Mapping[str, Sequence[Any]] | None, list[int], bool]]:
    """Every combination of the settings of one table: the method, the axes it is tuned on, its seeds, oracle or not."""
    settings = dict(table)
    cls = method_class(name)
    options = _validated(
        _MethodOptions, {key: settings.pop(key) for key in _MethodOptions.model_fields if key in settings}, name
    )
    known = [field.name for field in fields(cls)]
    for key in settings:
        if key not in known:
            raise unknown(f"setting of {name}", key, [*known, *_MethodOptions.model_fields])
    for combination in _combinations(settings, f"methods.{name}"):
        method = load_method(name, **combination)
        axes = getattr(method, "grid", {}) if options.tune is True else options.tune or None
        _check_axes(name, method, axes, settings, options.tune)
        seeds = options.seeds or plan.seeds
        yield method, axes, seeds, False
        if options.oracle:
            if name != "apfl" or axes:
                raise InputError(f"oracle is for apfl alone, and not together with tune; leave it out of {name}")
            yield method, None, seeds, True


def _check_axes(
    name: str, method: Method, axes: Mapping[str, Sequence[Any]] | None, settings: Mapping[str, Any], tune: Any
) -> None:
    if tune and not axes:
        raise InputError(f"{name} has nothing to tune by itself; give a grid: tune = {{SETTING = [VALUE, VALUE]}}")
    for key, values in (axes or {}).items():
        if key in settings:
            raise InputError(f"{name}.{key} is both given and tuned; leave one of them out")
        for value in values:
            load_method(name, **(asdict(method) | {key: value}))  # type: ignore[call-overload]


class _MethodOptions(BaseModel):
    model_config = STRICT

    tune: bool | dict[str, Annotated[list[Any], Field(min_length=1)]] = False
    seeds: Seeds | None = None
    oracle: bool = False  # beside the method, its best settings on the test rows


def _protocols(table: Mapping[str, Any]) -> Iterator[Protocol]:
    hints = get_type_hints(Protocol)
    known: dict[str, Any] = {key: (hint | list[hint], None) for key, hint in hints.items()}  # type: ignore[valid-type]
    valid = _validated(create_model("protocol", __config__=STRICT, **known), table, "protocol")
    for combination in _combinations(valid.model_dump(exclude_unset=True), "protocol"):  # 1 is 1.0 from here on
        if combination.get("partition") == "given":
            combination.setdefault("n_clients", None)
        yield Protocol(**combination)


def _combinations(table: Mapping[str, Any], where: str) -> Iterator[dict[str, Any]]:
    """A list means a sweep: every combination of its entries with those of the other lists."""
    axes = [value if isinstance(value, list) else [value] for value in table.values()]
    for key, axis in zip(table, axes, strict=True):
        if not axis:
            raise InputError(f"{where}.{key} is an empty list; a sweep needs at least one value")
    return (dict(zip(table, values, strict=True)) for values in product(*axes))


def _tables(given: dict[str, Any] | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return given if isinstance(given, list) else [given]


def _validated(model: type[T], given: Mapping[str, Any], where: str) -> T:
    """The model; the first thing wrong is one line that says what is allowed."""
    for key in given:
        if key not in model.model_fields:
            raise unknown(f"key in {where}", key, model.model_fields)
    try:
        return model.model_validate(dict(given))
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"] if part in model.model_fields or isinstance(part, int))
        shown = "" if problem["type"] == "missing" else f" = {problem['input']!r}"
        raise InputError(f"{where}: {key or 'it'}{shown}: {problem['msg']}") from error


def _digest(what: Any) -> str:
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:10]


def to_toml(plan: Plan) -> str:
    """The plan as TOML again: what was run, with what the command line replaced."""
    given = plan.model_dump(exclude_unset=True)
    nested = {"protocol": given.pop("protocol", {}), "methods": given.pop("methods")}
    lines = [f"{key} = {_value(value)}" for key, value in given.items() if value is not None]
    sections = [("protocol", nested["protocol"])]
    sections += [(f"methods.{name}", tables) for name, tables in nested["methods"].items()]
    for heading, tables in sections:
        for table in _tables(tables):
            lines += ["", f"[[{heading}]]" if isinstance(tables, list) else f"[{heading}]"]
            lines += [f"{key} = {_value(value)}" for key, value in table.items()]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_value(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(each) for each in value) + "]"
    if isinstance(value, bool | str):
        return json.dumps(value, ensure_ascii=False)  # a JSON string is a TOML string, but for what nobody types
    return repr(value)
