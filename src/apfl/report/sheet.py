"""Which records belong together: a column for each federation, a row for each method with its settings.

Records are averaged over seeds only where everything else is the same. Another file of data, another protocol or other
settings of the same method make a column or a row of their own; two different results of one run are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from apfl.errors import InputError
from apfl.experiments.headline import Headline
from apfl.experiments.record import Record, as_read, hashes, read_records
from apfl.experiments.run import Protocol
from apfl.methods import load_method, method_names

__all__ = ["Column", "Row", "Sheet", "gather", "read"]

ORACLE = ("gamma", "beta", "balance", "tau")  # what `apfl.experiments.oracle` looks for


@dataclass(frozen=True, eq=False)
class Column:
    """One federation, whatever the seed."""

    parts: tuple[str, ...]  # data, clients, alpha or partition, and what else tells it apart
    partition: str
    n_clients: int
    alpha: float | None
    data: str
    all_measured: bool = True  # every client that trains, as usual

    @property
    def label(self) -> str:
        return ", ".join(self.parts)


@dataclass(frozen=True, eq=False)
class Row:
    """One method; with its settings where some column has it with several."""

    method: str
    differs: Mapping[str, Any]  # the settings that tell it from the method's other rows; none if it has one row
    defaults: bool = False  # whether it is the one of several rows that has the method's own settings

    @property
    def competes(self) -> bool:
        """Not if its settings were found on the test rows."""
        return not self.method.endswith("_oracle")

    @property
    def label(self) -> str:
        told_apart = [f"{key}={_short(value)}" for key, value in self.differs.items()]
        told_apart += ["default"] if self.defaults else []
        return f"{self.method} ({', '.join(told_apart)})" if told_apart else self.method


@dataclass(frozen=True, eq=False)
class Sheet:
    """Records by row and column, in the order of their seeds."""

    rows: Sequence[Row]
    columns: Sequence[Column]
    cells: Mapping[tuple[Row, Column], Sequence[Record]]

    def records(self, column: Column) -> dict[Row, Sequence[Record]]:
        """The rows of one column."""
        return {row: self.cells[row, column] for row in self.rows if (row, column) in self.cells}

    @property
    def headline(self) -> Headline:
        """What its records are judged by first: those of one sheet are of one kind."""
        return self.all[0].headline

    @property
    def all(self) -> list[Record]:
        """Every record once."""
        return [record for records in self.cells.values() for record in records]

    def differs_between_columns(self, row: Row) -> bool:
        """Whether the row's settings are not the same everywhere, as after tuning for each federation."""
        used = {json.dumps(cell[0].settings, sort_keys=True) for (own, _), cell in self.cells.items() if own is row}
        return len(used) > 1

    def tuned(self, row: Row) -> bool:
        """Whether its settings were tuned on a part of the training rows."""
        return any(record.tuning for (own, _), cell in self.cells.items() if own is row for record in cell)


def read(paths: Iterable[Path]) -> list[Record]:
    """The records of some files and folders; none at all is an error."""
    kept: list[Record] = []
    for path in paths:
        if not path.exists():
            raise InputError(f"there is no {path}; give records.jsonl, or a folder that `apfl run` or `bench` wrote")
        kept += read_records(path)
    if not kept:
        raise InputError("no records given; `apfl run` and `apfl bench` write them, one for each method and seed")
    return kept


def gather(records: Iterable[Record]) -> Sheet:
    """Sort records into rows and columns."""
    known = list({(*_run(record), tuple(record.client_scores)): record for record in records}.values())
    _refuse_contradictions(known)
    _refuse_several_targets(known)
    columns = _columns(known)
    rows = _rows(known)
    cells: dict[tuple[Row, Column], list[Record]] = {}
    for record in sorted(known, key=lambda record: record.seed):
        key = (rows[record.method, _settings(record)], columns[_federation(record)])
        cells.setdefault(key, []).append(record)
    return Sheet(list(dict.fromkeys(rows.values())), list(columns.values()), cells)


def _refuse_several_targets(records: Sequence[Record]) -> None:
    targets = sorted({record.target for record in records})
    if len(targets) > 1:
        raise InputError(
            f"records of {' and '.join(targets)} given, which have no measure in common; give those of one kind"
        )


def _refuse_contradictions(records: Sequence[Record]) -> None:
    seen: dict[tuple[Any, ...], Record] = {}
    for record in records:
        other = seen.setdefault(_run(record), record)
        if other is not record:
            raise InputError(
                f"two results of one run, {record.method} with seed {record.seed} on {record.data}: "
                f"{other.score:.4f} (on {other.device}) and {record.score:.4f} "
                f"(on {record.device}); give the file of one of them"
            )


def _run(record: Record) -> tuple[Any, ...]:
    """Equal for two records of the same cell, whichever version wrote them."""
    return record.method, _settings(record), _federation(record), record.seed


def _distinguishing(record: Record) -> dict[str, Any]:
    """What makes two records of a method alike: settings, but for those that were tuned, of which the names count, and
    those that an oracle found for each seed."""
    tuned = sorted(record.tuning.get("axes", {}))
    ignored = ORACLE if record.method.endswith("_oracle") else ()
    plain = {name: value for name, value in record.settings.items() if name not in (*tuned, *ignored)}
    own = {"file": hashes(record.files)["method"][:8]} if "method" in record.files else {}  # another text, another row
    return plain | own | ({"tuned": "+".join(tuned)} if tuned else {})


def _settings(record: Record) -> str:
    return json.dumps(_distinguishing(record), sort_keys=True)


def _protocol(record: Record) -> dict[str, Any]:
    own = {"file": hashes(record.files)["partition"][:8]} if "partition" in record.files else {}
    return asdict(Protocol()) | dict(record.protocol) | own  # a record from before an option has its default


def _federation(record: Record) -> str:
    data = record.data_sha256 or record.data
    return json.dumps([data, record.partition, record.n_clients, record.alpha, _protocol(record)], sort_keys=True)


def _columns(records: Sequence[Record]) -> dict[str, Column]:
    by_key = {_federation(record): record for record in reversed(records)}
    order = sorted(by_key, key=lambda key: (by_key[key].data, by_key[key].n_clients, by_key[key].alpha or 0, key))
    alike: dict[tuple[str, ...], list[str]] = {}
    for key in order:
        alike.setdefault(_parts(by_key[key]), []).append(key)
    return {
        key: Column(
            (*parts, *_told_apart(by_key[key], [by_key[other] for other in keys])),
            by_key[key].partition,
            by_key[key].n_clients,
            by_key[key].alpha,
            by_key[key].data,
            not _protocol(by_key[key])["unseen_clients"] and _protocol(by_key[key])["reshuffle"] is None,
        )
        for parts, keys in alike.items()
        for key in keys
    }


def _parts(record: Record) -> tuple[str, ...]:
    how = record.partition if record.alpha is None else f"alpha {record.alpha:g}"
    protocol = _protocol(record)
    special = [f"{protocol['unseen_clients']} unseen in training"] if protocol["unseen_clients"] else []
    special += [] if protocol["reshuffle"] is None else [f"reshuffle {protocol['reshuffle']}, first client only"]
    return Path(record.data).name.removesuffix(".npz"), f"{record.n_clients} clients", how, *special


def _told_apart(record: Record, alike: Sequence[Record]) -> list[str]:
    """What a column has that another one with the same name has not."""
    described = [{"data": (each.data_sha256 or "?")[:8], **_protocol(each)} for each in alike]
    own = {"data": (record.data_sha256 or "?")[:8], **_protocol(record)}
    return [f"{key} {_short(own[key])}" for key in own if len({json.dumps(each.get(key)) for each in described}) > 1]


def _rows(records: Sequence[Record]) -> dict[tuple[str, str], Row]:
    by_method: dict[str, list[Record]] = {}
    for record in records:
        by_method.setdefault(record.method, []).append(record)
    return {
        (method, settings): row
        for method, own in by_method.items()
        for settings, row in (_variants(method, own) if _several_in_a_column(own) else _one_row(method, own)).items()
    }


def _several_in_a_column(records: Sequence[Record]) -> bool:
    """Whether some federation has the method with several settings."""
    in_column: dict[str, set[str]] = {}
    for record in records:
        in_column.setdefault(_federation(record), set()).add(_settings(record))
    return any(len(settings) > 1 for settings in in_column.values())


def _one_row(method: str, records: Sequence[Record]) -> dict[str, Row]:
    """One for all settings: perhaps tuned for each column, never two in one."""
    return dict.fromkeys((_settings(record) for record in records), Row(method, {}))


def _variants(method: str, records: Sequence[Record]) -> dict[str, Row]:
    """A row for each of the method's settings, told apart by those that vary."""
    variants = {_settings(record): _distinguishing(record) for record in records}
    names = dict.fromkeys(name for settings in variants.values() for name in settings)
    varying = [name for name in names if len({json.dumps(s.get(name)) for s in variants.values()}) > 1]
    varying = _enough(varying, variants, {name for record in records for name in record.tuning.get("axes", {})})
    defaults = _defaults(method)
    return {
        key: Row(method, {name: settings[name] for name in varying if name in settings}, settings == defaults)
        for key, settings in variants.items()
    }


def _enough(varying: list[str], variants: Mapping[str, Mapping[str, Any]], tuned: set[str]) -> list[str]:
    """Without the settings that some variant has tuned, and without what was tuned, if the others tell them apart."""
    given = [name for name in varying if name not in tuned and name != "tuned"]
    told = {json.dumps([settings.get(name) for name in given]) for settings in variants.values()}
    return given if len(told) == len(variants) else varying


def _defaults(method: str) -> dict[str, Any] | None:
    """A method's own settings as a record has them; None for a name from elsewhere."""
    if method not in method_names():
        return None
    settings: dict[str, Any] = as_read(asdict(load_method(method)))
    return settings


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
