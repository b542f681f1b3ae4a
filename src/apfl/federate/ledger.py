"""Who contributed what, in SQLite, with the large things in files beside it.

Every change is one transaction. A file is written and flushed before the transaction that refers to it, and deleted
after the one that no longer does; so at any moment the database refers only to files that are there, and whatever a
crash leaves over is swept when the ledger is opened again.

Every transaction keeps a digest of what decides who counts in which result, in time that does not grow with the number
of clients (`apfl.federate.tally`). It is checked when the ledger is opened: a bit that flips on the disk is noticed.

All SQL is here. What is called `write_...`, and whatever deletes, is called inside a `transaction`.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

from apfl.errors import InputError, unknown
from apfl.federate.blobs import Blobs, FolderError
from apfl.federate.tally import Tally
from apfl.federate.wire import sha256
from apfl.files import check_room, hold

__all__ = ["Ledger", "Part", "Row"]

log = logging.getLogger(__name__)

Row = dict[str, Any]
Answered = Literal["descriptions", "spreads", "landmarks", "contributions", "members", "tables", "metrics"]
Part = Literal["statistics", "table"]  # of what a client sends in a pilot
Stored = Literal["question", "primaries"]  # what the server sends in a pilot

FORMAT = 1
PILOT_FILES: tuple[Stored, ...] = ("question", "primaries")
SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE clients (name TEXT PRIMARY KEY, since REAL NOT NULL, gone REAL);
CREATE TABLE descriptions (client TEXT PRIMARY KEY REFERENCES clients ON DELETE CASCADE, sha256 TEXT NOT NULL,
  n INTEGER NOT NULL, bytes INTEGER NOT NULL, data BLOB NOT NULL, received REAL NOT NULL);
CREATE TABLE contributions (client TEXT PRIMARY KEY REFERENCES clients ON DELETE CASCADE, sha256 TEXT NOT NULL UNIQUE,
  n INTEGER NOT NULL, form TEXT NOT NULL, bytes INTEGER NOT NULL, blob TEXT, folded INTEGER NOT NULL,
  received REAL NOT NULL);
CREATE TABLE departed (sha256 TEXT PRIMARY KEY);
CREATE TABLE publications (number INTEGER PRIMARY KEY AUTOINCREMENT, blob TEXT NOT NULL, sha256 TEXT NOT NULL,
  bytes INTEGER NOT NULL, gamma REAL NOT NULL, unit REAL NOT NULL, n INTEGER NOT NULL, created REAL NOT NULL);
CREATE TABLE members (publication INTEGER NOT NULL REFERENCES publications ON DELETE CASCADE, client TEXT NOT NULL,
  sha256 TEXT NOT NULL, PRIMARY KEY (publication, client));
CREATE TABLE tables (publication INTEGER NOT NULL REFERENCES publications ON DELETE CASCADE, client TEXT NOT NULL,
  sha256 TEXT NOT NULL, n INTEGER NOT NULL, bytes INTEGER NOT NULL, data BLOB NOT NULL, received REAL NOT NULL,
  PRIMARY KEY (publication, client));
CREATE TABLE holders (client TEXT NOT NULL, publication INTEGER NOT NULL, sent REAL NOT NULL, confirmed REAL,
  PRIMARY KEY (client, publication));
CREATE TABLE metrics (client TEXT PRIMARY KEY REFERENCES clients ON DELETE CASCADE, publication INTEGER NOT NULL,
  accuracy REAL NOT NULL, n_test INTEGER NOT NULL, received REAL NOT NULL);
CREATE TABLE refusals (id INTEGER PRIMARY KEY, client TEXT, what TEXT NOT NULL, sha256 TEXT NOT NULL,
  bytes INTEGER NOT NULL, reason TEXT NOT NULL, received REAL NOT NULL);
CREATE TABLE events (id INTEGER PRIMARY KEY, at REAL NOT NULL, what TEXT NOT NULL, client TEXT, detail TEXT NOT NULL);
"""
EVERYONE = ""  # in place of a client's name: what was chosen for all
DIGEST = "digest of the rest"  # in meta
OF_TERMS = (  # in meta, what goes with the settled terms
    "terms", "terms_digest", "outline", "outline_digest", "trial", "trial_digest", "landmarks", "sum", "sum_sha256",
    "pilot", "pilot_question", "pilot_primaries", "influence", "stale",
)  # fmt: skip
TALLY = "tally:"  # how a digest begins; one of an earlier version is a plain SHA-256
# What decides a result. Data are known by their hash; times, events, refusals and former tables decide nothing.
DECISIVE = (
    "name, sql FROM sqlite_master", "name, seq FROM sqlite_sequence",
    f"key, value FROM meta WHERE key NOT IN ('{DIGEST}', 'instruction')", "name, gone FROM clients",
    "client, sha256, n FROM descriptions", "client, sha256, n FROM spreads", "client, 1 FROM landmarks",
    "client, part, sha256, n FROM pilots",
    "client, sha256, n, form, blob, folded FROM contributions",
    "sha256, 1 FROM departed", "number, blob, sha256, gamma, unit, n FROM publications",
    "publication, client, stage, sha256, n FROM stages",
    "publication, client, sha256 FROM members", "client, publication, confirmed FROM holders",
    "client, publication, sha256, n FROM tables WHERE publication = (SELECT MAX(number) FROM publications)",
)  # fmt: skip
NOT_COUNTED = (DIGEST, "instruction")  # keys of meta
# The columns that decide, by table; those that SQLite keeps itself are few, and are read each time.
TALLIED = {
    query.split(" FROM ")[1].split()[0]: [each for each in query.split(" FROM ")[0].split(", ") if each != "1"]
    for query in DECISIVE if " FROM sqlite_" not in query
}  # fmt: skip
LATER = """
CREATE TABLE pilots (client TEXT NOT NULL, part TEXT NOT NULL, sha256 TEXT NOT NULL, n INTEGER NOT NULL,
  bytes INTEGER NOT NULL, data BLOB NOT NULL, received REAL NOT NULL, PRIMARY KEY (client, part));
CREATE TABLE spreads (client TEXT PRIMARY KEY REFERENCES clients ON DELETE CASCADE, sha256 TEXT NOT NULL,
  n INTEGER NOT NULL, bytes INTEGER NOT NULL, data BLOB NOT NULL, received REAL NOT NULL);
CREATE TABLE landmarks (client TEXT PRIMARY KEY, sent REAL NOT NULL);
CREATE TABLE stages (publication INTEGER NOT NULL REFERENCES publications ON DELETE CASCADE, client TEXT NOT NULL,
  stage TEXT NOT NULL, sha256 TEXT NOT NULL, n INTEGER NOT NULL, bytes INTEGER NOT NULL, data BLOB NOT NULL,
  received REAL NOT NULL, PRIMARY KEY (publication, client, stage));
"""  # tables that a folder of an earlier version gets when it is opened to write
OVERVIEW = """
SELECT k.name, k.since, k.gone, d.n AS described, d.bytes AS description_bytes, c.n, c.sha256, c.form,
  c.bytes AS contribution_bytes, c.folded, c.received, t.bytes AS table_bytes, m.accuracy, m.n_test,
  m.publication AS measured
FROM clients k LEFT JOIN descriptions d ON d.client = k.name LEFT JOIN contributions c ON c.client = k.name
  LEFT JOIN tables t ON t.client = k.name AND t.publication = ? LEFT JOIN metrics m ON m.client = k.name
ORDER BY k.name
"""


class Ledger:
    """The coordinator's memory: one folder, one writer at a time.

    ``writer=False`` opens it to look at while a coordinator works on it. ``wait`` is how many seconds to wait for
    another writer to finish.
    """

    def __init__(self, folder: str | Path, *, writer: bool = True, wait: float = 0.0) -> None:
        self.folder = Path(folder)
        path = self.folder / "ledger.sqlite"
        if not writer and not path.exists():
            raise InputError(f"{self.folder} holds no federation; give the folder that the server works in")
        self.blobs = Blobs(self.folder / "blobs")
        self._lock = hold(self.folder / "lock", wait=wait, private=True) if writer else None
        try:
            self._open(path, writer)
        except (sqlite3.Error, UnicodeError, LookupError, TypeError) as error:  # of a database that is damaged
            self.close()
            raise _unusable(path, error) from error
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path, writer: bool) -> None:
        if writer:
            _make_private(self.folder, path)
        self._tally: Tally | None = None  # None: count anew
        self.db = sqlite3.connect(path, isolation_level=None, timeout=30)
        self.db.row_factory = sqlite3.Row
        for pragma in ("foreign_keys = ON", "synchronous = FULL", "secure_delete = ON"):
            self.db.execute(f"PRAGMA {pragma}")
        if not writer:
            return
        self.db.execute("PRAGMA journal_mode = WAL")
        if not self._has_table("meta"):
            with self.transaction():
                for statement in f"{SCHEMA}{LATER}".split(";\n"):
                    self.db.execute(statement)
                self.put("format", str(FORMAT))
        if self.get("format") != str(FORMAT):
            raise FolderError(f"{path} has format {self.get('format')}; this apfl reads {FORMAT}")
        self._check_unchanged(path)
        lacking = [each for each in LATER.split(";\n") if each.strip() and not self._has_table(each.split()[2])]
        if lacking:
            with self.transaction():
                for statement in lacking:
                    self.db.execute(statement)
        self._watch()
        self.blobs.sweep(self.referred())
        if self.get("scrub") == "due":
            self.scrub()

    def close(self) -> None:
        """Let go of the folder."""
        if hasattr(self, "db"):
            self.db.close()
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @contextmanager
    def transaction(self, *, decisive: bool = True) -> Iterator[None]:
        """All or nothing. One that is not ``decisive`` changes nothing that decides a result."""
        before = None if self._tally is None else self._tally.total
        try:
            self.db.execute("BEGIN IMMEDIATE")
            yield
            if decisive:
                self.put(DIGEST, self._digest())
            self.db.execute("COMMIT")
        except BaseException as error:
            with suppress(sqlite3.Error):
                self.db.execute("ROLLBACK")
            if self._tally is not None and before is not None:
                self._tally.total = before
            if isinstance(error, sqlite3.OperationalError):  # the disk is full or read-only, say
                raise _unusable(self.folder / "ledger.sqlite", error) from error
            raise

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """All that is read in it is of one moment."""
        self.db.execute("BEGIN")
        try:
            yield
        finally:
            self.db.execute("COMMIT")

    def _digest(self) -> str:
        """Of what decides a result."""
        tally = self._counted() if self._tally is None else self._tally
        own = self._hash_of([query for query in DECISIVE if " FROM sqlite_" in query])
        return f"{TALLY}{own}:{tally.total:064x}"

    def _hash_of(self, queries: Collection[str]) -> str:
        """SHA-256 of all that these queries give; with all of `DECISIVE`, the digest of an earlier version."""
        found = hashlib.sha256()
        for query in filter(self._can_ask, queries):
            rows = [tuple(row) for row in self.db.execute(f"SELECT {query} ORDER BY 1, 2")]
            found.update(repr(rows).encode(errors="backslashreplace"))
        return found.hexdigest()

    def _counted(self) -> Tally:
        """The tally of all rows."""
        tally = Tally()
        for table, columns in TALLIED.items():
            if self._has_table(table):
                for row in self.db.execute(f"SELECT {', '.join(columns)} FROM {table}"):
                    _count(tally, 1, table, *row)
        return tally

    def _watch(self) -> None:
        """Let the tally follow every change of this connection; nothing of this is kept in the file."""
        tally = self._counted()
        self.db.execute("PRAGMA recursive_triggers = ON")  # what INSERT OR REPLACE replaces is deleted aloud
        self.db.create_function("tally", -1, partial(_count, tally))
        for table, columns in TALLIED.items():
            new, old = (", ".join(f"{row}.{name}" for name in columns) for row in ("NEW", "OLD"))
            gone, come = f"SELECT tally(-1, '{table}', {old});", f"SELECT tally(1, '{table}', {new});"
            for what, does in (("INSERT", come), ("DELETE", gone), ("UPDATE", f"{gone} {come}")):
                name = f"tally_{table}_{what.lower()}"
                self.db.execute(f"CREATE TEMP TRIGGER {name} AFTER {what} ON main.{table} BEGIN {does} END")
        self._tally = tally

    def _can_ask(self, query: str) -> bool:
        """Whether the table is there: a folder of an earlier version is checked before it gets the later ones."""
        table = query.split(" FROM ")[1].split()[0]
        return table.startswith("sqlite_") or self._has_table(table)

    def _has_table(self, name: str) -> bool:
        return self.db.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (name,)).fetchone() is not None

    def _check_unchanged(self, path: Path) -> None:
        """Refuse a database that is not as the last transaction left it; an earlier version kept no digest."""
        (sound,) = self.db.execute("PRAGMA integrity_check(1)").fetchone()
        tables = [each for each in ("descriptions", "tables", "spreads", "pilots", "stages") if self._has_table(each)]
        # Moments are emptied once landmarks are drawn, and so is a pilot once it is over.
        data = (row for table in tables for row in self._rows(f"SELECT sha256, data FROM {table} WHERE length(data)"))
        if (
            sound != "ok"
            or not self._is_digest(self.get(DIGEST))
            or any(sha256(row["data"]) != row["sha256"] for row in data)
        ):
            raise FolderError(f"{path} has changed on disk; restore the folder from a backup")

    def _is_digest(self, kept: str | None) -> bool:
        """Whether this is the digest of the rows as they are, in its present form or in that of an earlier version."""
        if kept is None:
            return True
        return kept == (self._digest() if kept.startswith(TALLY) else self._hash_of(DECISIVE))

    def _rows(self, query: str, *values: Any) -> list[Row]:
        try:
            return [dict(row) for row in self.db.execute(query, values)]
        except (sqlite3.DatabaseError, UnicodeError) as error:
            raise _unusable(self.folder / "ledger.sqlite", error) from error

    def _each(self, query: str, *values: Any) -> Iterator[Row]:
        """The same, never all in memory."""
        try:
            for row in self.db.execute(query, values):
                yield dict(row)
        except (sqlite3.DatabaseError, UnicodeError) as error:
            raise _unusable(self.folder / "ledger.sqlite", error) from error

    def _row(self, query: str, *values: Any) -> Row | None:
        return next(iter(self._rows(query, *values)), None)

    def _insert(self, table: str, **values: Any) -> None:
        columns, marks = ", ".join(values), ", ".join("?" * len(values))
        self.db.execute(f"INSERT INTO {table} ({columns}) VALUES ({marks})", tuple(values.values()))

    def get(self, key: str) -> str | None:
        """A single value that the ledger keeps."""
        row = self._row("SELECT value FROM meta WHERE key = ?", key)
        return None if row is None else str(row["value"])

    def put(self, key: str, value: str) -> None:
        """Keep a single value."""
        self.db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def know(self, client: str) -> None:
        """Make sure that a client has a row."""
        self.db.execute("INSERT OR IGNORE INTO clients VALUES (?, ?, NULL)", (client, time.time()))

    def event(self, what: str, client: str | None = None, **detail: Any) -> None:
        """Write down that something happened, here and as one line of JSON in the log."""
        self._insert("events", at=time.time(), what=what, client=client, detail=json.dumps(detail, sort_keys=True))
        log.info(json.dumps({"event": what, "client": client, **detail}, sort_keys=True))

    def referred(self) -> set[str]:
        """The files that the database refers to."""
        names = {row["blob"] for row in self._rows("SELECT blob FROM contributions WHERE blob IS NOT NULL")}
        names |= {row["blob"] for row in self._rows("SELECT blob FROM publications")}
        names |= {name for name, _ in self.cohort_sums().values()}
        names |= {each["blob"] for each in json.loads(self.get("releases") or "[]") if each["blob"]}
        names |= {_pilot_file(what) for what in PILOT_FILES if self.get(f"pilot_{what}")}
        return names | {name for name in (self.get("sum"), self.get("landmarks"), self.get("public")) if name}

    def scrub(self) -> None:
        """Overwrite what was deleted: in the database and in its log. If a reader is in the way, when next opened."""
        self.db.execute("VACUUM")
        busy = self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        with self.transaction():
            self.put("scrub", "due" if busy else "done")

    # ---------------------------------------------------------------------------------- clients, descriptions

    def names(self) -> list[str]:
        """All clients, those that left too."""
        return [row["name"] for row in self._rows("SELECT name FROM clients ORDER BY name")]

    def known(self, client: str) -> str:
        """The client's name, if it is one of those here."""
        names = self.names()
        if client not in names:
            raise unknown("client", client, names)
        return client

    def is_gone(self, client: str) -> bool:
        """Whether a client left."""
        return self._row("SELECT 1 FROM clients WHERE name = ? AND gone IS NOT NULL", client) is not None

    def gone(self) -> frozenset[str]:
        """The clients that left."""
        return frozenset(row["name"] for row in self._rows("SELECT name FROM clients WHERE gone IS NOT NULL"))

    def answered(self, table: Answered, publication: int | None = None) -> frozenset[str]:
        """The clients whose answer is here; of the answers to a publication, those to this one."""
        where = "WHERE publication = ?" if table in ("members", "tables", "metrics") else ""
        rows = self._rows(f"SELECT client FROM {table} {where}", *((publication,) if where else ()))
        return frozenset(row["client"] for row in rows)

    def descriptions(self) -> list[Row]:
        """The descriptions, in the order of the clients' names."""
        return self._rows("SELECT * FROM descriptions ORDER BY client")

    def description_of(self, client: str) -> Row | None:
        """A client's description."""
        return self._row("SELECT * FROM descriptions WHERE client = ?", client)

    def write_description(self, client: str, sha256: str, n: int, data: bytes) -> None:
        """Keep a client's description in place of its former one."""
        self.know(client)
        self.drop_description(client)
        self._insert(
            "descriptions", client=client, sha256=sha256, n=n, bytes=len(data), data=data, received=time.time()
        )

    def drop_description(self, client: str) -> None:
        """A client's description does not count any more."""
        self.db.execute("DELETE FROM descriptions WHERE client = ?", (client,))

    def spreads(self) -> Iterator[Row]:
        """The moments behind the landmarks, in the order of the clients' names, one at a time."""
        return self._each("SELECT * FROM spreads ORDER BY client")

    def spread_of(self, client: str) -> Row | None:
        """What is known of a client's moments, without them."""
        return self._row("SELECT client, sha256, n, bytes FROM spreads WHERE client = ?", client)

    def write_spread(self, client: str, sha256: str, n: int, data: bytes) -> None:
        """Keep a client's moments in place of its former ones."""
        self.db.execute("DELETE FROM spreads WHERE client = ?", (client,))
        self._insert("spreads", client=client, sha256=sha256, n=n, bytes=len(data), data=data, received=time.time())

    def empty_spreads(self) -> None:
        """The landmarks are drawn: nobody's moments are kept, only what they weighed."""
        self.db.execute("UPDATE spreads SET data = x''")
        self.put("scrub", "due")

    def spread_bytes(self) -> dict[str, int]:
        """What each client's moments weighed."""
        if not self._row("SELECT 1 FROM sqlite_master WHERE name = 'spreads'"):  # a folder of an earlier version
            return {}
        return {row["client"]: row["bytes"] for row in self._rows("SELECT client, bytes FROM spreads")}

    # ------------------------------------------------------------------------------------------------ the pilot

    def pilots(self, part: Part) -> Iterator[Row]:
        """What clients sent in the pilot, in the order of their names, one at a time."""
        return self._each("SELECT * FROM pilots WHERE part = ? ORDER BY client", part)

    def pilot_of(self, client: str, part: Part) -> Row | None:
        """What is known of what a client sent in the pilot, without it."""
        return self._row("SELECT client, sha256, n, bytes FROM pilots WHERE client = ? AND part = ?", client, part)

    def pilot_hashes(self, part: Part) -> list[str]:
        """The hashes of what clients sent in the pilot."""
        return [row["sha256"] for row in self._rows("SELECT sha256 FROM pilots WHERE part = ? ORDER BY client", part)]

    def piloted(self, part: Part) -> frozenset[str]:
        """The clients that have sent it."""
        return frozenset(row["client"] for row in self._rows("SELECT client FROM pilots WHERE part = ?", part))

    def write_pilot(self, client: str, part: Part, sha256: str, n: int, data: bytes) -> None:
        """Keep what a client sent in the pilot."""
        self._insert(
            "pilots", client=client, part=part, sha256=sha256, n=n, bytes=len(data), data=data, received=time.time()
        )

    def put_pilot(self, what: Stored, data: bytes, also: Callable[[], None]) -> None:
        """Keep what sites are sent in the pilot, and in the same transaction what ``also`` writes."""
        digest = self.blobs.put(_pilot_file(what), data)
        with self.transaction():
            self.put(f"pilot_{what}", digest)
            also()

    def read_pilot(self, what: Stored) -> bytes:
        """What sites are sent in the pilot."""
        return self.blobs.read(_pilot_file(what), self.get(f"pilot_{what}") or "")

    def empty_pilot(self) -> list[str]:
        """The normalisation is chosen: of what was sent only its weight is kept. The files to remove after that."""
        self.db.execute("UPDATE pilots SET data = x''")
        self.put("scrub", "due")
        return self._drop_pilot_files()

    def restart_pilot(self) -> list[str]:
        """A pilot under way begins anew, with nothing sent. The files to remove after that; none if there is none."""
        if self.get("pilot") is not None or self.get("trial") is None:
            return []
        self.db.execute("DELETE FROM pilots")
        self.db.execute("DELETE FROM meta WHERE key IN ('trial', 'trial_digest')")
        self.event("pilot restarts")
        return self._drop_pilot_files()

    def _drop_pilot_files(self) -> list[str]:
        self.db.execute("DELETE FROM meta WHERE key IN ('pilot_question', 'pilot_primaries')")
        return [_pilot_file(what) for what in PILOT_FILES]

    def pilot_bytes(self) -> dict[str, int]:
        """What each client sent in the pilot weighed."""
        if not self._has_table("pilots"):  # a folder of an earlier version
            return {}
        rows = self._rows("SELECT client, SUM(bytes) AS bytes FROM pilots GROUP BY client")
        return {row["client"]: row["bytes"] for row in rows}

    # ------------------------------------------------------------------------------------------ landmarks kept

    def write_landmarks_kept(self, client: str) -> None:
        """A client has answered a message that brought the landmarks, and keeps them."""
        self.db.execute("INSERT OR REPLACE INTO landmarks VALUES (?, ?)", (client, time.time()))

    def drop_landmarks_kept(self, client: str) -> None:
        """A client may not have the landmarks any more."""
        self.db.execute("DELETE FROM landmarks WHERE client = ?", (client,))

    # ------------------------------------------------------------------------------------------ contributions

    def contributions(self, *, folded: bool) -> list[Row]:
        """The contributions in the sum, or those not yet in it, in the order of the clients' names."""
        return self._rows("SELECT * FROM contributions WHERE folded = ? ORDER BY client", int(folded))

    def n_contributions(self, *, folded: bool) -> int:
        """How many contributions are in the sum, or not yet in it."""
        query = "SELECT COUNT(*) FROM contributions WHERE folded = ?"
        return int(self.db.execute(query, (int(folded),)).fetchone()[0])

    def contribution_of(self, client: str) -> Row | None:
        """A client's contribution."""
        return self._row("SELECT * FROM contributions WHERE client = ?", client)

    def contribution(self, sha256: str) -> Row | None:
        """The contribution with this hash."""
        return self._row("SELECT * FROM contributions WHERE sha256 = ?", sha256)

    def departed(self, sha256: str) -> bool:
        """Whether a contribution was taken out."""
        return self._row("SELECT 1 FROM departed WHERE sha256 = ?", sha256) is not None

    def write_contribution(self, client: str, sha256: str, n: int, form: str, n_bytes: int, blob: str | None) -> None:
        """Keep a contribution as pending; its client is one of those here, also if it had left."""
        self.know(client)
        self.db.execute("UPDATE clients SET gone = NULL WHERE name = ?", (client,))
        self._insert(
            "contributions", client=client, sha256=sha256, n=n, form=form, bytes=n_bytes, blob=blob, folded=0,
            received=time.time(),
        )  # fmt: skip

    def write_folded(self, client: str, blob: str | None) -> None:
        """A contribution is in the sum; ``blob`` is the file that keeps its bytes, if they are kept."""
        self.db.execute("UPDATE contributions SET folded = 1, blob = ? WHERE client = ?", (blob, client))

    def cohort_sums(self) -> dict[str, tuple[str, str]]:
        """Under masks: a cohort's roster -> the file with its sum, and the file's hash."""
        kept = json.loads(self.get("cohort sums") or "{}")
        return {cohort: (str(name), str(digest)) for cohort, (name, digest) in kept.items()}

    def write_cohort_sum(self, cohort: str, name: str, digest: str) -> None:
        """Keep where a cohort's sum is."""
        self.put("cohort sums", json.dumps(self.cohort_sums() | {cohort: (name, digest)}))

    def drop_cohort_sum(self, cohort: str) -> None:
        """A cohort's sum does not count any more."""
        self.put("cohort sums", json.dumps({key: kept for key, kept in self.cohort_sums().items() if key != cohort}))

    # ------------------------------------------------------------------------------------------- publications

    def current(self) -> Row | None:
        """The current publication; None before the first, and after someone in it left until one is made anew."""
        if self.get("stale") == "1":
            return None
        return self._row("SELECT * FROM publications ORDER BY number DESC LIMIT 1")

    def last_number(self) -> int:
        """The last number given to a publication, also if it was deleted; 0 before the first."""
        row = self._row("SELECT seq FROM sqlite_sequence WHERE name = 'publications'")
        return 0 if row is None else int(row["seq"])

    def publications(self) -> list[Row]:
        """All publications, in order."""
        return self._rows("SELECT * FROM publications ORDER BY number")

    def publications_with(self, client: str) -> list[Row]:
        """The publications that include a client."""
        return self._rows(
            "SELECT p.* FROM publications p JOIN members m ON m.publication = p.number WHERE m.client = ? "
            "ORDER BY p.number", client,
        )  # fmt: skip

    def members(self, number: int) -> dict[str, str]:
        """Who is in a publication, with the hash of what they contributed."""
        rows = self._rows("SELECT client, sha256 FROM members WHERE publication = ? ORDER BY client", number)
        return {row["client"]: row["sha256"] for row in rows}

    def member(self, number: int, client: str) -> str | None:
        """The hash of what a client contributed to a publication; None if it is not in it."""
        row = self._row("SELECT sha256 FROM members WHERE publication = ? AND client = ?", number, client)
        return None if row is None else str(row["sha256"])

    def write_publication(self, members: Mapping[str, str], number: int, **values: str | int | float) -> None:
        """Keep a publication: from now on it is the current one."""
        self._insert("publications", number=number, created=time.time(), **values)
        for client, digest in members.items():
            self._insert("members", publication=number, client=client, sha256=digest)
        self.put("stale", "0")

    def write_holder(self, client: str, number: int) -> None:
        """A client was sent a publication, and may hold it from now on."""
        self.know(client)
        self.db.execute("INSERT OR IGNORE INTO holders VALUES (?, ?, ?, NULL)", (client, number, time.time()))

    def write_confirmed(self, client: str, number: int) -> None:
        """A client has refitted to a publication, and no longer holds an earlier one."""
        self.db.execute("DELETE FROM holders WHERE client = ? AND publication < ?", (client, number))
        self.db.execute(
            "UPDATE holders SET confirmed = ? WHERE client = ? AND publication = ?", (time.time(), client, number)
        )

    def confirmed(self, number: int | None) -> frozenset[str]:
        """The clients that have refitted to a publication."""
        rows = self._rows("SELECT client FROM holders WHERE publication = ? AND confirmed IS NOT NULL", number)
        return frozenset(row["client"] for row in rows)

    def held_by(self, client: str) -> list[int]:
        """The publications that a client holds."""
        rows = self._rows("SELECT publication FROM holders WHERE client = ? ORDER BY publication", client)
        return [row["publication"] for row in rows]

    def holders(self, numbers: Collection[int]) -> list[str]:
        """The clients that hold one of these publications."""
        query = f"SELECT DISTINCT client FROM holders WHERE publication IN ({_marks(numbers)}) ORDER BY client"
        return [row["client"] for row in self._rows(query, *numbers)]

    # ---------------------------------------------------------------------------- tables, metrics, refusals, events

    def tables(self, number: int) -> Iterator[Row]:
        """The tables of left-out hits under a publication, one at a time."""
        return self._each("SELECT * FROM tables WHERE publication = ? ORDER BY client", number)

    def table_of(self, client: str, number: int) -> Row | None:
        """A client's table under a publication."""
        return self._row("SELECT * FROM tables WHERE publication = ? AND client = ?", number, client)

    def write_table(self, client: str, number: int, sha256: str, n: int, data: bytes) -> None:
        """Keep a client's table."""
        self._insert(
            "tables", publication=number, client=client, sha256=sha256, n=n, bytes=len(data), data=data,
            received=time.time(),
        )  # fmt: skip

    def staged(self, number: int | None, stage: str) -> frozenset[str]:
        """The clients whose table of this stage of the choice for a publication is here."""
        query = "SELECT client FROM stages WHERE publication = ? AND stage = ? AND client != ?"
        rows = self._rows(query, number, stage, EVERYONE) if self._has_table("stages") else []
        return frozenset(row["client"] for row in rows)

    def stage_tables(self, number: int, stage: str) -> Iterator[Row]:
        """These tables, in the order of the clients' names, one at a time."""
        query = "SELECT * FROM stages WHERE publication = ? AND stage = ? AND client != ? ORDER BY client"
        return self._each(query, number, stage, EVERYONE)

    def stage_of(self, number: int, stage: str, client: str) -> Row | None:
        """A client's table of a stage."""
        query = "SELECT * FROM stages WHERE publication = ? AND stage = ? AND client = ?"
        return self._row(query, number, stage, client)

    def chosen_in(self, number: int, stage: str) -> Row | None:
        """What was chosen in a stage, for everyone."""
        return self.stage_of(number, stage, EVERYONE)

    def write_stage(self, client: str, number: int, stage: str, sha256: str, n: int, data: bytes) -> None:
        """Keep a client's table of a stage."""
        self._insert(
            "stages", publication=number, client=client, stage=stage, sha256=sha256, n=n, bytes=len(data), data=data,
            received=time.time(),
        )  # fmt: skip

    def write_chosen(self, number: int, stage: str, sha256: str, data: bytes) -> None:
        """Keep what was chosen in a stage, for everyone."""
        self.write_stage(EVERYONE, number, stage, sha256, 0, data)

    def stage_bytes(self, number: int | None) -> dict[str, int]:
        """What each client's tables of the stages under a publication weigh."""
        if not self._has_table("stages"):  # a folder of an earlier version
            return {}
        query = "SELECT client, SUM(bytes) AS bytes FROM stages WHERE publication = ? AND client != ? GROUP BY client"
        return {row["client"]: row["bytes"] for row in self._rows(query, number, EVERYONE)}

    def write_metrics(self, client: str, number: int, accuracy: float, n_test: int) -> None:
        """Keep what a client reports, in place of its former report."""
        self.know(client)
        self.db.execute("DELETE FROM metrics WHERE client = ?", (client,))
        self._insert(
            "metrics", client=client, publication=number, accuracy=accuracy, n_test=n_test, received=time.time()
        )

    def write_refusal(self, client: str | None, what: str, sha256: str, n_bytes: int, reason: str) -> None:
        """Keep that a message was refused, and why."""
        self._insert(
            "refusals", client=client, what=what, sha256=sha256, bytes=n_bytes, reason=reason, received=time.time()
        )

    def refusals(self, n: int) -> tuple[list[Row], int]:
        """The last ``n`` refusals, the latest first, and how many there are."""
        last = self._rows("SELECT * FROM refusals ORDER BY id DESC LIMIT ?", n)
        return last, int(self.db.execute("SELECT COUNT(*) FROM refusals").fetchone()[0])

    def events(self, n: int) -> list[Row]:
        """The last ``n`` events, the latest first."""
        rows = self._rows("SELECT * FROM events ORDER BY id DESC LIMIT ?", n)
        return [{**row, "detail": json.loads(row["detail"])} for row in rows]

    def overview(self, number: int | None) -> list[Row]:
        """What each client has sent, with its table under this publication."""
        return self._rows(OVERVIEW, number)

    def influence(self, current: Row | None) -> dict[str, float]:
        """What was computed for this publication, by the contribution's hash; empty if nothing was."""
        kept = json.loads(self.get("influence") or "{}")
        of_this = current is not None and kept.get("publication") == current["number"]
        return dict(kept["members"]) if of_this else {}

    # ------------------------------------------------------------------------------------------------ leaving

    def take_out(self, client: str) -> None:
        """Delete a client's contribution and every publication that includes it; the same bytes do not come back."""
        stale = [row["number"] for row in self.publications_with(client)]
        self.db.execute("INSERT OR IGNORE INTO departed SELECT sha256 FROM contributions WHERE client = ?", (client,))
        self.db.execute("DELETE FROM contributions WHERE client = ?", (client,))
        self.db.execute(f"DELETE FROM publications WHERE number IN ({_marks(stale)})", stale)
        if stale:
            self.put("stale", "1")
            self.db.execute("DELETE FROM meta WHERE key = 'influence'")

    def unsettle(self) -> list[str]:
        """Delete the settled terms and all that was made under them, but for the descriptions. The files to remove."""
        files = self.referred() - {self.get("public")}
        for table in ("contributions", "publications", "spreads", "pilots", "landmarks", "metrics"):
            self.db.execute(f"DELETE FROM {table}")
        self.db.execute(f"DELETE FROM meta WHERE key IN ({_marks(OF_TERMS)})", OF_TERMS)
        self.put("reopened", str(self.last_number()))
        self.put("scrub", "due")
        self.event("reopened")
        return sorted(files)

    def erase(self, client: str, *, forget: bool) -> None:
        """What the ledger says about a client: all of it (``forget``), or all but that it was there and left."""
        self.put("scrub", "due")
        kept = ("events", "refusals") if forget else ()
        for table in (
            "descriptions",
            "pilots",
            "spreads",
            "landmarks",
            "metrics",
            "tables",
            "stages",
            "holders",
            *kept,
        ):
            self.db.execute(f"DELETE FROM {table} WHERE client = ?", (client,))
        if forget:
            self._unname(client)
            self.db.execute("DELETE FROM clients WHERE name = ?", (client,))
            self.event("forgot")
        else:
            self.db.execute("UPDATE clients SET gone = ? WHERE name = ?", (time.time(), client))
            self.event("left", client)

    def _unname(self, client: str) -> None:
        """Take a name out of the reasons why others were refused; the refusals themselves stay."""
        whole = re.compile(rf"(?<![\w.-]){re.escape(client)}(?![\w-])")  # site-1 is not site-10
        for row in self._rows("SELECT id, reason FROM refusals"):
            if whole.search(row["reason"]):
                reason = whole.sub("(forgotten)", row["reason"])
                self.db.execute("UPDATE refusals SET reason = ? WHERE id = ?", (reason, row["id"]))


def _count(tally: Tally, sign: int, table: str, *row: Any) -> None:
    """A row that decides is there, or is not any more."""
    if table != "meta" or row[0] not in NOT_COUNTED:
        tally.count(sign, table, *row)


def _pilot_file(what: str) -> str:
    return f"pilot-{what}.safetensors"


def _make_private(folder: Path, database: Path) -> None:
    """Only the server's user may look into its folder; SQLite gives its other files the mode of the first."""
    with suppress(OSError):  # what is not ours to change, or cannot be written, is told when it is opened
        folder.chmod(0o700)
        os.close(os.open(database, os.O_CREAT | os.O_RDWR, 0o600))
        database.chmod(0o600)


def _unusable(path: Path, error: Exception) -> FolderError:
    """The error that the database cannot be used: because of its disk, or because it is damaged."""
    try:
        check_room(path.parent)
    except InputError as reason:
        return FolderError(str(reason))
    return FolderError(f"{path} cannot be used as a ledger ({error}); try again, else restore it from a backup")


def _marks(values: Collection[object]) -> str:
    return ", ".join("?" * len(values))
