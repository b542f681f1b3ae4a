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
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from apfl.data.registry import is_path
from apfl.errors import InputError, unknown

__all__ = ["LARGEST_SEED", "STRICT", "Plan", "Seed", "Seeds", "read_plan", "tables_of", "to_toml", "validated"]

log = logging.getLogger(__name__)
LARGEST_SEED = 2**63 - 1  # the maps of the two streams are drawn from 2 seed and 2 seed + 1, of 64 bits
SEED = f"a whole number from 0 to {LARGEST_SEED}"
SEEDS = f"a list of whole numbers from 0 to {LARGEST_SEED}, for example [0, 1, 2]"
Seed = Annotated[int, Field(ge=0, le=LARGEST_SEED)]
Seeds = Annotated[list[Seed], Field(min_length=1, description=SEEDS)]
T = TypeVar("T", bound=BaseModel)
Tables = dict[str, Any] | Annotated[list[dict[str, Any]], Field(min_length=1)]
SOURCE = (
    "data", "backbone", "pooling", "revision", "backbone_revision", "splits",
    "image_column", "label_column", "feature_column", "on_corrupt",
)  # fmt: skip
DRAWN = ("n_clients", "alpha", "minimum", "classes_per_client")  # of no use where a column names the clients
STRICT = ConfigDict(extra="forbid", strict=True, frozen=True)

WORDS = {
    "bool_type": "true or false", "int_type": "a whole number", "float_type": "a number", "string_type": "a text",
    "list_type": "a list of such", "dict_type": "a table",
}  # fmt: skip


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
    on_corrupt: Literal["refuse", "skip"] | None = None
    seeds: Seeds = [0, 1, 2]
    threads: Annotated[int, Field(ge=1)] = 1  # of torch and BLAS, for each cell: another number may round differently
    rounds: Annotated[int, Field(ge=1)] | None = None  # of the gradient methods, in place of their own: a trial
    checkpoint_seconds: Annotated[float, Field(ge=0)] = 60
    protocol: Tables = Field(default_factory=dict, description="a table [protocol], or several [[protocol]]")
    methods: Annotated[
        dict[str, Tables], Field(min_length=1, description="a table [methods.NAME] for each method, at least one")
    ]

    @property
    def source(self) -> dict[str, Any]:
        """Where the data come from: what `load_data` is called with."""
        return {name: getattr(self, name) for name in SOURCE if getattr(self, name) is not None}


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
        given = {key: value for key, value in given.items() if key not in SOURCE} | dict(source)
    first = validated(Plan, given, "plan").seeds[0]
    given |= {key: value for key, value in overrides.items() if value is not None}
    plan = validated(Plan, given, "plan")
    for name in only or ():
        if is_path(name):  # one's own method beside those of the plan
            plan.methods.setdefault(name, {})
        elif name not in plan.methods:
            raise unknown("method in the plan", name, plan.methods)
    first_seed = None if overrides.get("seeds") is None else first
    kept = {
        name: _for_seeds(tables, first_seed) for name, tables in plan.methods.items() if only is None or name in only
    }
    return plan.model_copy(update={"methods": kept, "protocol": _dealt(plan.protocol, protocol or {})})


def _toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise InputError(f"cannot read the plan {path}: {error.strerror}; see experiments/ for some") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is not TOML: {error}") from error


def _tell_dropped(given: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """Columns and the like are of the plan's own data; other data without --backbone say themselves if they need it."""
    dropped = [key for key in SOURCE[2:] if key in given and overrides.get(key) is None]
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
            own = kept.pop("seeds", None)
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
        problems = [problem for problem in error.errors() if problem["loc"][0] == key]
        words = [WORDS.get(problem["type"], problem["msg"].removeprefix("Input should be ")) for problem in problems]
        allowed = " or ".join(dict.fromkeys(words))
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
