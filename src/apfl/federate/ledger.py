"""Who contributed what, in SQLite, with the large things in files beside it.

Every change is one transaction. A file is written and flushed before the transaction that refers to it, and deleted
after the one that no longer does; so at any moment the database refers only to files that are there, and whatever a
crash leaves over is swept when the ledger is opened again.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from apfl.errors import InputError
from apfl.federate.blobs import Blobs, FolderError

__all__ = ["Ledger"]

log = logging.getLogger(__name__)

FORMAT = 1
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
        self._lock: int | None = _lock(self.folder / "lock", wait) if writer else None
        try:
            self._open(path, writer)
        except sqlite3.Error as error:
            self.close()
            raise FolderError(f"{path} cannot be used as a ledger ({error}); restore it from a backup") from error
        except BaseException:
            self.close()
            raise

    def _open(self, path: Path, writer: bool) -> None:
        self.db = sqlite3.connect(path, isolation_level=None, timeout=30)
        self.db.row_factory = sqlite3.Row
        for pragma in ("foreign_keys = ON", "synchronous = FULL", "secure_delete = ON"):
            self.db.execute(f"PRAGMA {pragma}")
        if not writer:
            return
        self.db.execute("PRAGMA journal_mode = WAL")
        with self.transaction():
            if not self.db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
                for statement in SCHEMA.split(";\n"):
                    self.db.execute(statement)
                self.put("format", str(FORMAT))
        if self.get("format") != str(FORMAT):
            raise FolderError(f"{path} has format {self.get('format')}; this apfl reads {FORMAT}")
        self.blobs.sweep(self.referred())
        if self.get("scrub") == "due":
            self.scrub()

    def close(self) -> None:
        """Let go of the folder."""
        if hasattr(self, "db"):
            self.db.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing."""
        self.db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            with suppress(sqlite3.Error):
                self.db.execute("ROLLBACK")
            raise
        self.db.execute("COMMIT")

    def rows(self, query: str, *values: Any) -> list[dict[str, Any]]:
        """What a query finds."""
        return [dict(row) for row in self.db.execute(query, values)]

    def row(self, query: str, *values: Any) -> dict[str, Any] | None:
        """The first that a query finds."""
        found = self.db.execute(query, values).fetchone()
        return None if found is None else dict(found)

    def get(self, key: str) -> str | None:
        """A single value that the ledger keeps."""
        found = self.row("SELECT value FROM meta WHERE key = ?", key)
        return None if found is None else str(found["value"])

    def put(self, key: str, value: str) -> None:
        """Keep a single value."""
        self.db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def insert(self, table: str, **values: Any) -> int:
        """A new row; its number."""
        columns, marks = ", ".join(values), ", ".join("?" * len(values))
        cursor = self.db.execute(f"INSERT INTO {table} ({columns}) VALUES ({marks})", tuple(values.values()))
        return int(cursor.lastrowid or 0)

    def know(self, client: str) -> None:
        """Make sure that a client has a row."""
        self.db.execute("INSERT OR IGNORE INTO clients VALUES (?, ?, NULL)", (client, time.time()))

    def event(self, what: str, client: str | None = None, **detail: Any) -> None:
        """Write down that something happened, here and as one line of JSON in the log."""
        self.insert("events", at=time.time(), what=what, client=client, detail=json.dumps(detail, sort_keys=True))
        log.info(json.dumps({"event": what, "client": client, **detail}, sort_keys=True))

    def referred(self) -> set[str]:
        """The files that the database refers to."""
        names = {row["blob"] for row in self.rows("SELECT blob FROM contributions WHERE blob IS NOT NULL")}
        names |= {row["blob"] for row in self.rows("SELECT blob FROM publications")}
        running = self.get("sum")
        return names | ({running} if running else set())

    def scrub(self) -> None:
        """Overwrite what was deleted: in the database and in its log. If a reader is in the way, when next opened."""
        self.db.execute("VACUUM")
        busy = self.db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        self.put("scrub", "due" if busy else "done")


def _lock(path: Path, wait: float) -> int:
    """Hold the folder's lock as long as this process lives; the system lets go of it when it is killed."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise FolderError(f"cannot write to {path.parent}: {error.strerror or error}") from error
    try:
        import fcntl
    except ImportError:  # a system without such locks
        return handle
    until = time.monotonic() + wait
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except OSError:
            if time.monotonic() >= until:
                os.close(handle)
                raise InputError(f"{path.parent} is in use by another coordinator; stop it first, or ask it") from None
            time.sleep(0.05)
