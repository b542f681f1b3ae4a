"""Flower's processes: how they are started, found and stopped.

The server's folder holds a ``flower/`` of its own: Flower's database, by which a restarted server knows its sites
again, its configuration, and the app.
"""

from __future__ import annotations

import ipaddress
import json
import math
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from apfl.errors import InputError, printable
from apfl.federate.flower.admission import (
    Registered,
    fingerprint,
    read_nodes,
    read_registered,
    write_node,
    write_registered,
)
from apfl.federate.flower.bundle import write_app
from apfl.federate.flower.guard import end
from apfl.federate.flower.keys import ServerKeys, public_keys
from apfl.federate.flower.orphan import PARENT
from apfl.files import cannot_write, hold, replacing

__all__ = ["Server", "environment", "free_port", "is_loopback", "running", "split_address"]

PATIENCE = 10.0  # seconds that a process has to end by itself
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",  # else every run installs the app's dependencies anew
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
}
MOMENT = 5.0  # seconds for the processes of a server that was killed to end
AGAIN = 60.0  # seconds after which a key that Flower refused is tried again: it may have been busy
CONNECTION = "federation"  # the server's name in Flower's configuration


def environment(flwr_home: Path, **more: str) -> dict[str, str]:
    """The environment of Flower's processes: our programs first, its own home, nothing phoned home."""
    programs = str(Path(sys.executable).parent)
    path = f"{programs}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, **QUIET, "PATH": path, "FLWR_HOME": str(flwr_home.absolute()), **more}


@dataclass(frozen=True)
class Server:
    """A federation's server: its folder and where it listens."""

    folder: Path
    host: str = "127.0.0.1"
    port: int = 9091
    secure: bool = True
    refused: dict[str, tuple[float, str]] = field(default_factory=dict, repr=False, compare=False)  # key: when, why

    @property
    def home(self) -> Path:
        """Flower's own files."""
        return self.folder / "flower"

    @property
    def keys(self) -> ServerKeys:
        return ServerKeys(self.folder / "keys")

    @property
    def environment(self) -> dict[str, str]:
        return environment(self.home, APFL_FEDERATION=str(self.folder.absolute()))

    @property
    def address(self) -> str:
        """Where this machine reaches the server."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    def command(self) -> list[str]:
        """The SuperLink."""
        words = [sys.executable, "-m", "apfl.federate.flower.superlink", "--host", self.host, "--port", str(self.port)]
        words += ["--database", str(self.home / "superlink.db")]
        if not self.secure:
            return [*words, "--insecure"]
        keys = self.keys.check()
        words += ["--ssl-ca-certfile", str(keys.authority), "--ssl-certfile", str(keys.certificate)]
        return [*words, "--ssl-keyfile", str(keys.private), "--enable-supernode-auth"]

    def hold(self) -> IO[bytes]:
        """The lock of the one server in this folder; one that was just killed has a moment to end."""
        return hold(self.home / "server.lock", what=self.folder, wait=MOMENT, private=True)

    def write(self) -> None:
        """Flower's configuration and the app, so that plain ``flwr`` commands find the server too."""
        lines = ["[superlink]", f'default = "{CONNECTION}"', "", f"[superlink.{CONNECTION}]"]
        lines += [f'address = "{self.address}"']
        authority = json.dumps(str(self.keys.authority.absolute()))  # a JSON string is a TOML string
        lines += [f"root-certificates = {authority}" if self.secure else "insecure = true"]
        with replacing(self.home / "config.toml") as temporary:
            temporary.write_text("\n".join(lines) + "\n")
        write_app(self.home / "app")
        with replacing(self.home / "server.json") as temporary:
            settings = {"folder": "", "host": self.host, "port": self.port, "secure": self.secure}
            temporary.write_text(json.dumps(settings))

    @staticmethod
    def read(folder: Path) -> Server:
        """The server that was started in ``folder``."""
        try:
            return Server(**(json.loads((folder / "flower" / "server.json").read_text()) | {"folder": folder}))
        except (OSError, ValueError, TypeError) as error:
            raise InputError(f"no server was started in {folder}; first: apfl federate server {folder}") from error

    def answers(self) -> bool:
        """Whether something listens there."""
        host, port = split_address(self.address)
        with suppress(OSError):
            socket.create_connection((host, port), 2).close()
            return True
        return False

    def flwr(self, *words: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        """A ``flwr`` command for this server, to its end."""
        try:
            return subprocess.run(
                self.flwr_command(*words), env=self.environment, capture_output=True, text=True, timeout=timeout
            )
        except subprocess.TimeoutExpired as error:
            raise InputError(
                f"the server at {self.address} did not carry out 'flwr {' '.join(words[:2])}' within {timeout:.0f} s; "
                f"try again, and if it stays so see {self.home / 'superlink.log'}"
            ) from error

    @staticmethod
    def flwr_command(*words: str) -> list[str]:
        return [str(Path(sys.executable).parent / "flwr"), *words]

    @property
    def registered(self) -> dict[str, Registered]:
        """The sites that are admitted."""
        return read_registered(self.home / "registered.json")

    def admit(self) -> list[str]:
        """Bring the list of admitted sites up to the public keys in the folder; what changed, in sentences."""
        told, problems, keys = [], [], public_keys(self.keys.folder)
        for name in sorted(set(self.registered) - set(keys)):
            self.dismiss(name)
            told.append(f"no longer admitted: {name}")
        for name, path in keys.items():
            try:
                told += self._admit(name, path)
            except InputError as error:  # the other keys are as good as before
                problems.append(str(error))
        if problems:
            raise InputError("; ".join([*told, *problems]))
        return told

    def _admit(self, name: str, path: Path) -> list[str]:
        before, key = self.registered.get(name), fingerprint(path)
        if before is not None and before.key == key:
            return []
        self._check_refused(key)
        done = self.flwr("supernode", "register", str(path), CONNECTION, "--name", name, "--format", "json")
        match = re.search(r'"node-id": "?(\d+)', done.stdout)
        said = done.stdout + done.stderr
        if not match and "already" not in said:  # Flower has it from before, or from its own command
            problem = f"{path} was not admitted: {printable(said.strip()[-300:])}"
            self.refused[key] = time.monotonic(), problem
            raise InputError(problem)
        site = Registered(match.group(1) if match else self._known_node(key, before), key)
        if site.node:
            write_node(self.home / "key_nodes.json", key, site.node)
        write_registered(self.home / "registered.json", self.registered | {name: site})
        return [f"{'admitted' if before is None else 'changed the key of'} {name} ({key})"]

    def _known_node(self, key: str, before: Registered | None) -> str:
        """The node of a key that Flower has from before; empty if nothing here says which."""
        earlier = before.node if before is not None and not before.key else ""  # a version that kept no key
        return read_nodes(self.home / "key_nodes.json").get(key, earlier)

    def _check_refused(self, key: str) -> None:
        """Raise again what Flower said to a key just now: a look is not worth a process that says the same."""
        at, problem = self.refused.get(key, (-math.inf, ""))
        if time.monotonic() - at < AGAIN:
            raise InputError(problem)

    def dismiss(self, name: str) -> None:
        """Take a site off the list; without its key in the folder the server does not serve it."""
        kept = {each: site for each, site in self.registered.items() if each != name}
        write_registered(self.home / "registered.json", kept)


@contextmanager
def running(
    command: Sequence[str], env: dict[str, str], log: Path, *, append: bool = True, lock: IO[bytes] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A process with all it starts, in a group of its own, which ends with the block; it holds ``lock`` as we do."""
    with _opened(log, append) as output:
        process = subprocess.Popen(
            command,
            env={**env, PARENT: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=() if lock is None else (lock.fileno(),),
        )
    try:
        yield process
    finally:
        end(process, PATIENCE)


def _opened(log: Path, append: bool) -> IO[bytes]:
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        return log.open("ab" if append else "wb")
    except OSError as error:
        raise cannot_write(log, error) from error


def wait_until(
    true: Callable[[], bool], process: subprocess.Popen[bytes] | None, seconds: float, what: str, log: Path
) -> None:
    """Wait for a condition, as long as the process lives."""
    end = time.monotonic() + seconds
    while not true():
        if process is not None and process.poll() is not None:
            raise InputError(f"{what} ended with code {process.returncode}: {last_lines(log)} (all of it: {log})")
        if time.monotonic() > end:
            raise InputError(f"{what} was not ready after {seconds:.0f} s: {last_lines(log)} (all of it: {log})")
        time.sleep(0.1)


def last_lines(log: Path, n: int = 3) -> str:
    """What a log ends with."""
    with suppress(OSError):
        lines = log.read_text(errors="replace").splitlines()[-n:]
        return " | ".join(printable(line) for line in lines if line.strip())
    return "no log"


def free_port() -> int:
    """A port nobody listens on at this machine's loopback address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def split_address(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT.

    >>> split_address("fed.example.org:9091"), split_address("[::1]:9091")
    (('fed.example.org', 9091), ('::1', 9091))
    """
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdigit() and 0 < int(port) < 65536):
        raise InputError(f"address '{address}' given; expected HOST:PORT, for example fed.example.org:9091")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether an address is this machine talking to itself.

    >>> is_loopback("localhost"), is_loopback("127.0.0.1"), is_loopback("0.0.0.0"), is_loopback("fed.example.org")
    (True, True, False, False)
    """
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
