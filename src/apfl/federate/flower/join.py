"""A site's connection, kept up: a SuperNode that ends is started again.

Flower gives a site's key back to it only a minute after its last sign of life, so a site that was killed is turned
away at first. A key that the server does not know is turned away in the same words; patience tells the two apart.
The key of a site that has left is turned away in words of its own (`admission`).
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from apfl.errors import InputError
from apfl.federate.flower.admission import LEFT
from apfl.federate.flower.clock import wrong_clock
from apfl.federate.flower.processes import environment, free_port, last_lines, running
from apfl.federate.flower.telling import Telling

__all__ = ["PATIENCE", "Connection", "changed_rows", "stay_connected"]

PATIENCE = 90.0  # seconds; Flower takes up to 60 to notice that a site is gone
TURNED_AWAY = "[code: 2004]"
PAUSES = (2.0, 5.0, 10.0, 30.0)


@dataclass(frozen=True)
class Connection:
    """A site's connection: its folder, its rows, the server and the key it is known by."""

    folder: Path
    name: str
    data: str
    server: str
    authority: Path | None = None
    key: Path | None = None
    config: Mapping[str, str | int | float | bool] = field(default_factory=dict)  # what the site allows

    def command(self) -> list[str]:
        """The SuperNode."""
        words = [sys.executable, "-m", "apfl.federate.flower.supernode", "--superlink", self.server]
        if self.authority is None:
            words += ["--insecure"]
        else:
            words += ["--root-certificates", str(self.authority)]
        if self.key is not None:
            words += ["--auth-supernode-private-key", str(self.key)]
        config = {"name": self.name, "data": self.data, "folder": str(self.folder.absolute()), **self.config}
        settings = " ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in config.items())
        return [*words, "--port", str(free_port()), "--node-config", settings]

    @property
    def environment(self) -> dict[str, str]:
        return environment(self.folder / "flower")


def stay_connected(site: Connection, log: Path, say: Callable[[str], None], patience: float = PATIENCE) -> None:
    """Keep the site connected until interrupted; raise if the server does not admit its key."""
    turned_away_since: float | None = None
    failures = 0
    while True:
        begin, telling = _size(log), Telling(log)
        with running(site.command(), site.environment, log) as process:
            code = _wait(process, log, begin, telling, say)
        lines = _since(log, begin)
        connected = "SuperNode ID:" in lines
        failures = 0 if connected else failures + 1
        if TURNED_AWAY not in lines or connected:
            turned_away_since = None
        else:
            turned_away_since = turned_away_since or time.monotonic()
            if LEFT in lines:
                raise _left(site)
            if time.monotonic() - turned_away_since > patience:
                raise InputError(
                    f"the server at {site.server} does not admit the key of {site.name}: give {site.name}.pub to "
                    "whoever runs the server, for its keys folder. If it is there, another process uses the key: end it"
                )
        clock = wrong_clock(site.server, site.authority)
        if "CERTIFICATE_VERIFY_FAILED" in lines and clock is None:
            raise InputError(
                f"the certificate of {site.server} was not issued by the authority given with --ca ({site.authority}), "
                "or is for another host name; get ca.crt from whoever runs the server"
            )
        pause = PAUSES[min(failures, len(PAUSES) - 1)]
        ended = f"the connection ended (code {code}: {last_lines(log, 1)[:120]}); again in {pause:.0f} s"
        say(f"{clock}; {ended}" if clock else ended)
        time.sleep(pause)


def _left(site: Connection) -> InputError:
    """That a site is no longer in the federation, and what that means."""
    masked = " A server that kept the former sum learns this site's part from the difference to the new one."
    return InputError(
        f"{site.name} has left the federation at {site.server}: whoever runs the server took it out. Its model in "
        f"{site.folder} still predicts. To take part again, ask whoever runs the server to put the key back "
        f"(keys/{site.name}.pub), and join with --rejoin.{masked if site.config.get('roster') else ''}"
    )


def changed_rows(federation: str, how: str) -> str:
    """That the rows are no longer those that the federation has, and what to do."""
    return (
        f"the rows have changed since they were contributed to {federation} ({how}). The federation still has the "
        "former ones; to replace them, join again with --rejoin"
    )


def _wait(process: subprocess.Popen[bytes], log: Path, begin: int, telling: Telling, say: Callable[[str], None]) -> int:
    """Wait for the SuperNode to end; say once that it is connected, and what its processes tell."""
    connected = False
    while True:
        code = process.poll()
        if not connected and "SuperNode ID:" in _since(log, begin):
            connected = True
            say("connected; waiting for the server's runs (Ctrl-C leaves the connection, not the federation)")
        for line in telling.lines():
            say(line)
        if code is not None:
            return int(code)
        time.sleep(0.5)


def _size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def _since(log: Path, begin: int) -> str:
    with log.open("rb") as file:
        file.seek(begin)
        return file.read(1 << 20).decode(errors="replace")
