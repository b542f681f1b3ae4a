"""A plan: what to run, in a TOML file. A list means a sweep; everything is checked before anything runs.

Top-level keys are the fields of `Plan`; ``[protocol]`` those of `Protocol`; ``[methods.NAME]`` the method's settings
and ``tune``, ``tuning_seed``, ``seeds`` and ``oracle``. Several ``[[protocol]]`` or ``[[methods.NAME]]`` are several
sweeps.
"""

from __future__ import annotations

import json
import logging
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from apfl.data.load import Source
from apfl.data.registry import is_path
from apfl.errors import InputError, allowed_in_words, unknown
from apfl.experiments.seeds import Seeds, listed

__all__ = ["STRICT", "Plan", "plan_names", "read_plan", "tables_of", "to_toml", "validated"]

log = logging.getLogger(__name__)
T = TypeVar("T", bound=BaseModel)
Tables = dict[str, Any] | Annotated[list[dict[str, Any]], Field(min_length=1)]
DRAWN = ("n_clients", "alpha", "minimum", "classes_per_client")  # of no use where a column names the clients
STRICT = ConfigDict(extra="forbid", strict=True, frozen=True)


def _data_keys() -> dict[str, Any]:
    """The fields of `Source`, with their types and defaults."""
    kinds = get_type_hints(Source)
    allowed = {each.name: each.metadata["allowed"] for each in fields(Source)}
    return {
        each.name: (Literal[allowed[each.name]] if allowed[each.name] else kinds[each.name], each.default)
        for each in fields(Source)
    }


DataKeys: Any = create_model("DataKeys", __config__=STRICT, **_data_keys())


class Plan(DataKeys):  # type: ignore[misc]
    """What a plan says, key by key: those of its data are `Source`'s. The fields are the only home of the defaults."""

    title: str = ""
    seeds: Seeds = Field(default=[0, 1, 2])
    threads: Annotated[int, Field(ge=1)] = 1  # of torch and BLAS, for each cell: another number may round differently
    rounds: Annotated[int, Field(ge=1)] | None = None  # of the gradient methods, in place of their own: a trial
    checkpoint_seconds: Annotated[float, Field(ge=0)] = 60
    protocol: Tables = Field(default_factory=dict, description="a table [protocol], or several [[protocol]]")
    methods: Annotated[
        dict[str, Tables], Field(min_length=1, description="a table [methods.NAME] for each method, at least one")
    ]

    @property
    def source(self) -> dict[str, Any]:
        """Where the data come from, as a record keeps it."""
        return Source(**{name: getattr(self, name) for name in DataKeys.model_fields}).changed()


def read_plan(
    path: Path,
    *,
    source: Mapping[str, Any] | None = None,
    protocol: Mapping[str, Any] | None = None,
    only: Sequence[str] | None = None,
    **overrides: Any,
) -> Plan:
    """The plan in a file, with some keys replaced (those that are not None).

    ``source`` replaces all that the plan says about its data, ``protocol`` replaces keys of every ``[protocol]`` table,
    ``only`` names the methods to keep; a path ``./mine.py:Mine`` adds that method.
    """
    given = _toml(path)
    if source is not None:
        _tell_dropped(given, overrides)
        given = {key: value for key, value in given.items() if key not in DataKeys.model_fields} | dict(source)
    first = validated(Plan, given, "plan").seeds[0]
    given |= {key: value for key, value in overrides.items() if value is not None}
    plan = validated(Plan, given, "plan")
    first_seed = None if overrides.get("seeds") is None else first
    methods = plan.methods if only is None else _only(plan.methods, only)
    kept = {name: _for_seeds(tables, first_seed) for name, tables in methods.items()}
    changed: Plan = plan.model_copy(update={"methods": kept, "protocol": _dealt(plan.protocol, protocol or {})})
    return changed


def _only(methods: Mapping[str, Tables], names: Sequence[str]) -> dict[str, Tables]:
    """The methods of these names, in the plan's order, then those that are given by path and not in the plan."""
    for name in names:
        if name not in methods and not is_path(name):
            raise unknown("method in the plan", name, methods)
    return {name: tables for name, tables in methods.items() if name in names} | {
        name: {} for name in names if name not in methods
    }


def plan_names() -> list[str]:
    """The plans that come with apfl."""
    return sorted(path.stem for path in _plans().glob("*.toml"))


def _plans() -> Path:
    """The folder of the plans that come with apfl: inside the package if it is installed, else of the source tree."""
    inside = Path(__file__).parent / "plans"
    return inside if inside.is_dir() else Path(__file__).parents[3] / "experiments"


def _found(path: Path) -> Path:
    """The file itself; if there is none, the plan of that name: own, own.toml and experiments/own.toml are one."""
    named = str(path.parent) in (".", "experiments") and path.suffix in ("", ".toml") and path.stem in plan_names()
    return _plans() / f"{path.stem}.toml" if named and not path.is_file() else path


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_found(path).read_text())
    except OSError as error:
        have = ", ".join(plan_names())
        raise InputError(f"cannot read the plan {path}: {error.strerror}; give a file, or one of: {have}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not TOML: {error}") from error


def _tell_dropped(given: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """Columns and the like are of the plan's own data; other data without --backbone say themselves if they need it."""
    details = [key for key in DataKeys.model_fields if key not in ("data", "backbone")]
    dropped = [key for key in details if key in given and overrides.get(key) is None]
    if dropped:
        options = " and ".join(f"--{key.replace('_', '-')}" for key in dropped)
        log.info("other data than the plan's: its %s left out; %s would set them", ", ".join(dropped), options)


def _dealt(tables: Tables, given: Mapping[str, Any]) -> Tables:
    """The protocol with what is given (not None). A client column makes the clients, as it does for `apfl run`."""
    changes = {key: value for key, value in given.items() if value is not None}
    dealt = []
    for table in tables_of(tables):
        kept = dict(table)
        if "client_column" in changes and table.get("partition") != "domains":
            kept = {key: value for key, value in table.items() if key not in DRAWN} | {"partition": "given"}
        dealt.append(kept | changes)
    return dealt if isinstance(tables, list) else dealt[0]


def _for_seeds(tables: Tables, first_seed: int | None) -> Tables:
    """The tables of a method. Where seeds are given, those are for every method, but it is still tuned on
    the first that the plan says (``first_seed``, or its own): a part of a plan is then the same as in the whole."""
    changed = []
    for table in tables_of(tables):
        kept = dict(table)
        if first_seed is not None:
            own = listed(kept.pop("seeds", None))
            if kept.get("tune"):
                kept.setdefault("tuning_seed", own[0] if isinstance(own, list) and own else first_seed)
        changed.append(kept)
    return changed if isinstance(tables, list) else changed[0]


def tables_of(given: Tables) -> list[dict[str, Any]]:
    """One table, or several, as several."""
    return given if isinstance(given, list) else [given]


def validated(model: type[T], given: Mapping[str, Any], where: str) -> T:
    """The model; the first thing wrong is one line that says what is allowed."""
    for key in given:
        if key not in model.model_fields:
            raise unknown(f"key in {where}", key, model.model_fields)
    try:
        return model.model_validate(dict(given))
    except ValidationError as error:
        raise InputError(f"{where}: {_said(model, given, error)}") from error


def _said(model: type[BaseModel], given: Mapping[str, Any], error: ValidationError) -> str:
    """The first key that is wrong, its value, and in words what is allowed: the field's own, or those of its types."""
    key = str(error.errors()[0]["loc"][0])
    shown = f"{key} = {given[key]!r}" if key in given else f"{key} is missing"
    if (allowed := model.model_fields[key].description) is None:
        allowed = allowed_in_words(problem for problem in error.errors() if problem["loc"][0] == key)
    return f"{shown} given; allowed: {allowed}" if key in given else f"{shown}; give {allowed}"


def to_toml(plan: Plan) -> str:
    """The plan as TOML again: what was run, with what the command line replaced."""
    given = plan.model_dump(exclude_unset=True)
    nested = {"protocol": given.pop("protocol", {}), "methods": given.pop("methods")}
    lines = [f"{key} = {_value(value)}" for key, value in given.items() if value is not None]
    sections = [("protocol", nested["protocol"])]
    sections += [
        (f"methods.{json.dumps(name) if is_path(name) else name}", tables) for name, tables in nested["methods"].items()
    ]
    for heading, tables in sections:
        for table in tables_of(tables):
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
