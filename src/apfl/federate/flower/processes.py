"""Flower's processes: how they are started, found and stopped.

The server's folder holds a ``flower/`` of its own: Flower's database, by which a restarted server knows its sites
again, its configuration, and the app.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from apfl.errors import InputError
from apfl.federate.flower.bundle import write_app
from apfl.federate.flower.keys import ServerKeys, public_keys
from apfl.federate.flower.orphan import PARENT
from apfl.files import replacing

__all__ = ["Server", "environment", "free_port", "is_loopback", "running", "split_address"]

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",  # else every run installs the app's dependencies anew
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2",
}
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
            temporary.write_text(json.dumps(asdict(self) | {"folder": ""}))

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
        return subprocess.run(
            self.flwr_command(*words), env=self.environment, capture_output=True, text=True, timeout=timeout
        )

    @staticmethod
    def flwr_command(*words: str) -> list[str]:
        return [str(Path(sys.executable).parent / "flwr"), *words]

    @property
    def registered(self) -> dict[str, str]:
        """Name -> number of the sites that Flower's database admits."""
        path = self.home / "registered.json"
        return dict(json.loads(path.read_text())) if path.exists() else {}

    def admit(self) -> list[str]:
        """Register the public keys in the folder that are not registered yet; the names that were new."""
        new = [name for name in public_keys(self.keys.folder) if name not in self.registered]
        for name in new:
            path = self.keys.folder / f"{name}.pub"
            done = self.flwr("supernode", "register", str(path), CONNECTION, "--name", name, "--format", "json")
            found = re.search(r'"node-id": "?(\d+)', done.stdout)
            said = done.stdout + done.stderr
            if not found and "already" not in said:  # it may have been registered with Flower's own command
                raise InputError(f"{path} was not admitted: {said.strip()[-300:]}")
            self._keep(self.registered | {name: found.group(1) if found else ""})
        return new

    def dismiss(self, name: str) -> None:
        """Take a site's key off the list."""
        if name in self.registered:
            if self.registered[name]:
                self.flwr("supernode", "unregister", self.registered[name], CONNECTION)
            self._keep({each: node for each, node in self.registered.items() if each != name})

    def _keep(self, registered: Mapping[str, str]) -> None:
        with replacing(self.home / "registered.json") as temporary:
            temporary.write_text(json.dumps(registered))


@contextmanager
def running(
    command: Sequence[str], env: dict[str, str], log: Path, *, append: bool = True
) -> Iterator[subprocess.Popen[bytes]]:
    """A process with all it starts, in a group of its own, which ends with the block."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab" if append else "wb") as output:
        process = subprocess.Popen(
            command,
            env={**env, PARENT: str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes], patience: float = 10) -> None:
    """Ask the process to end, then make its whole group end."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


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
        return " | ".join(line.strip() for line in log.read_text(errors="replace").splitlines()[-n:] if line.strip())
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
