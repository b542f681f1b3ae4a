"""A site's connection, kept up: a SuperNode that ends is started again.

Flower gives a site's key back to it only a minute after its last sign of life, so a site that was killed is turned
away at first. A key that the server does not know is turned away in the same words; patience tells the two apart.
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
from apfl.federate.flower.processes import environment, free_port, last_lines, running

__all__ = ["PATIENCE", "Connection", "stay_connected"]

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
        told = " ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in config.items())
        return [*words, "--port", str(free_port()), "--node-config", told]

    @property
    def environment(self) -> dict[str, str]:
        return environment(self.folder / "flower")


def stay_connected(site: Connection, log: Path, say: Callable[[str], None], patience: float = PATIENCE) -> None:
    """Keep the site connected until interrupted; raise if the server does not admit its key."""
    turned_away_since: float | None = None
    failures = 0
    while True:
        begin = _size(log)
        with running(site.command(), site.environment, log) as process:
            code = _wait(process, log, begin, say)
        told = _since(log, begin)
        connected = "SuperNode ID:" in told
        failures = 0 if connected else failures + 1
        if TURNED_AWAY not in told or connected:
            turned_away_since = None
        else:
            turned_away_since = turned_away_since or time.monotonic()
            if time.monotonic() - turned_away_since > patience:
                raise InputError(
                    f"the server at {site.server} does not admit the key of {site.name} (or another process uses it): "
                    f"give {site.name}.pub to whoever runs the server, for its keys folder"
                )
        if "CERTIFICATE_VERIFY_FAILED" in told:
            raise InputError(
                f"the certificate of {site.server} was not issued by the authority given with --ca ({site.authority}), "
                "or is for another host name; get ca.crt from whoever runs the server"
            )
        pause = PAUSES[min(failures, len(PAUSES) - 1)]
        say(f"the connection ended (code {code}: {last_lines(log, 1)[:120]}); again in {pause:.0f} s")
        time.sleep(pause)


def _wait(process: subprocess.Popen[bytes], log: Path, begin: int, say: Callable[[str], None]) -> int:
    """Wait for the SuperNode to end; say once that it is connected."""
    told = False
    while True:
        code = process.poll()
        if not told and "SuperNode ID:" in _since(log, begin):
            told = True
            say("connected; waiting for the server's runs (Ctrl-C leaves the connection, not the federation)")
        if code is not None:
            return int(code)
        time.sleep(0.5)


def _size(log: Path) -> int:
    return log.stat().st_size if log.exists() else 0


def _since(log: Path, begin: int) -> str:
    with log.open("rb") as file:
        file.seek(begin)
        return file.read(1 << 20).decode(errors="replace")
