"""Real processes for the deployment tests: one server, some sites, all on loopback, all gone at the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits

from apfl.data.federation import Shard
from apfl.methods import method_class

APFL = [sys.executable, "-c", "from apfl.cli import main; main()"]
CLASSES = [str(i) for i in range(10)]
PATIENCE = 600.0  # seconds until a wait is given up; every wait ends as soon as what it waits for is so


def digits_sites(names: Sequence[str], seed: int = 0) -> tuple[dict[str, Shard], dict[str, Shard]]:
    """The embedded digits spread unevenly over sites: training and test rows of each."""
    digits = load_digits()
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(digits.target))
    weights = np.arange(1, len(names) + 1) + 1.0
    cuts = (np.cumsum(weights)[:-1] / weights.sum() * len(order)).astype(int)
    train, test = {}, {}
    for name, rows in zip(names, np.split(order, cuts), strict=True):
        features = torch.from_numpy(digits.data[rows]).float()
        labels = torch.from_numpy(digits.target[rows]).long()
        n = 3 * len(rows) // 4
        train[name], test[name] = Shard(features[:n], labels[:n]), Shard(features[n:], labels[n:])
    return train, test


class World:
    """A server and its sites, each started with the commands a person would use."""

    def __init__(
        self, root: Path, names: Sequence[str], *, secure: bool = True, host: str = "127.0.0.1", **terms: Any
    ) -> None:
        self.root, self.secure, self.host, self.terms = root, secure, host, {"map": "random", **terms}  # cheapest
        self.mark = uuid.uuid4().hex
        self.processes: list[subprocess.Popen[bytes]] = []
        self.folder = root / "server"
        self.port = free_port()
        self.train, self.test = digits_sites(names)
        for name in names:
            self.write(name)
        if secure:
            self.apfl("federate", "keys", self.folder / "keys", "--host", host, *self.each("--site", names))

    @staticmethod
    def each(option: str, values: Sequence[Any]) -> list[str]:
        return [word for value in values for word in (option, str(value))]

    def write(self, name: str) -> None:
        """The site's own file of features; a column says which rows are for testing."""
        train, test = self.train[name], self.test[name]
        (self.root / name).mkdir(parents=True, exist_ok=True)
        np.savez(
            self.root / name / "features.npz",
            features=np.concatenate([train.features.numpy(), test.features.numpy()]),
            labels=np.concatenate([train.labels.numpy(), test.labels.numpy()]),
            class_names=np.array(CLASSES),
            test=np.arange(len(train) + len(test)) >= len(train),
        )

    # Processes

    def start(self, role: str, words: Sequence[Any], within: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        """Start a command of apfl, marked so that it and all it starts can be found."""
        log = self.root / f"{role}.log"
        env = {**os.environ, "APFL_WORLD": f"{self.mark}:{role}", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        with log.open("ab") as output:
            process = subprocess.Popen(
                [*within, *APFL, *map(str, words)], env=env, stdin=subprocess.DEVNULL, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.processes.append(process)
        return process

    def apfl(self, *words: Any) -> str:
        """Run a command of apfl to its end; what it printed."""
        done = self._done(*words)
        return done.stdout + done.stderr

    def json(self, *words: Any) -> dict[str, Any]:
        """Run a command of apfl that prints JSON."""
        return dict(json.loads(self._done(*words, "--json").stdout))

    def _done(self, *words: Any) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "APFL_WORLD": f"{self.mark}:command", "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        done = subprocess.run([*APFL, *map(str, words)], env=env, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def flwr(self, *words: str) -> str:
        """A plain Flower command, in the environment that the documentation names."""
        env = {**os.environ, "FLWR_HOME": str(self.folder / "flower"), "APFL_WORLD": f"{self.mark}:command"}
        env |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        program = Path(sys.executable).parent / "flwr"
        done = subprocess.run([program, *words], env=env, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def pids(self, role: str, command: str = "") -> list[int]:
        """Processes that belong to a role, of all generations; with ``command`` only those that run it."""
        found, mark = [], f"APFL_WORLD={self.mark}:{role}".encode()
        for path in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                variables = (path / "environ").read_bytes().split(b"\0")
                line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if (
                    mark in variables or (role == "" and any(v.startswith(mark) for v in variables))
                ) and command in line:
                    found.append(int(path.name))
        return found

    def signal(self, number: signal.Signals, role: str, command: str = "") -> list[int]:
        """Send a signal to every process of a role."""
        pids = self.pids(role, command)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        return pids

    def kill(self, role: str, command: str = "") -> None:
        """SIGKILL, and wait until they are gone."""
        assert self.signal(signal.SIGKILL, role, command), f"nothing runs as {role} {command}"
        self.until(lambda: not self.pids(role, command), f"{role} {command} gone")

    @contextmanager
    def stalled(self, name: str) -> Iterator[None]:
        """A site whose disk hangs when it looks up what it has sent, until the block ends.

        Its processes are alive all the while and tell Flower so; one that was stopped would be given up for dead.
        """
        path = self.root / name / "site" / "server" / name / "sent.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(path)
        yield
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_NONBLOCK), "w") as pipe:  # refused unless it is being read
            pipe.write("{}")

    def end(self) -> None:
        """Nothing of this world survives, whatever happened."""
        while self.signal(signal.SIGKILL, ""):
            time.sleep(0.05)
        for process in self.processes:
            process.wait()

    # The roles

    def server(self) -> subprocess.Popen[bytes]:
        words = ["federate", "server", self.folder, "--host", self.host, "--port", self.port, *self.settings()]
        before = len(self.log("server"))
        process = self.start("server", [*words, "--secure" if self.secure else "--insecure"])
        self.until(lambda: "ready" in self.log("server")[before:], "the server")
        return process

    def settings(self) -> list[str]:
        """The terms as options."""
        words = [] if "masked" in self.terms else ["--plain"]  # masked worlds say so
        for key, value in self.terms.items():
            if isinstance(value, bool):
                words.append(f"--{'' if value else 'no-'}{key.replace('_', '-')}")
                continue
            words += ["--set", f"{key}={value}"] if key in METHOD else [f"--{key.replace('_', '-')}", str(value)]
        return words

    def join(self, name: str, *more: str, role: str = "", within: Sequence[str] = ()) -> subprocess.Popen[bytes]:
        words = [
            "federate",
            "join",
            "--server",
            f"{self.host}:{self.port}",
            "--data",
            self.root / name / "features.npz",
        ]
        words += [
            "--name",
            name,
            "--folder",
            self.root / name / "site",
            "--yes",
            "--report",
            "--test-column",
            "test",
            *more,
        ]
        if self.secure:
            words += ["--ca", self.folder / "keys/ca.crt", "--key", self.folder / f"keys/{name}.key"]
        return self.start(role or name, words, within)

    def connected(self, *roles: str) -> None:
        """Wait until the sites are connected."""
        for role in roles:
            self.until(lambda role=role: "connected;" in self.log(role), f"{role} connected")

    def run(self, *more: Any) -> subprocess.Popen[bytes]:
        """Start a run; its process."""
        return self.start("run", ["federate", "run", self.folder, "--json", *more])

    def finish(self, process: subprocess.Popen[bytes], code: int = 0) -> None:
        """Wait for the end of a run."""
        self.until(lambda: process.poll() is not None, "the run")
        assert process.returncode == code, self.log("run")[-3000:]

    # What can be seen

    def log(self, role: str) -> str:
        path = self.root / f"{role}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def events(self) -> list[dict[str, Any]]:
        """The server app's own structured log: one line for everything it asked and got."""
        path = self.folder / "events.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def seen(self, event: str, **fields: Any) -> list[dict[str, Any]]:
        return [e for e in self.events() if e["event"] == event and all(e.get(k) == v for k, v in fields.items())]

    def until(self, true: Callable[[], Any], what: str, pause: float = 0.05) -> None:
        """Wait for a condition; give up, with the logs, when it stays away."""
        end = time.monotonic() + PATIENCE
        while not true():
            if time.monotonic() > end:
                logs = "\n".join(
                    f"--- {p.name}\n{p.read_text(errors='replace')[-1500:]}" for p in self.root.glob("*.log")
                )
                raise AssertionError(f"waited {PATIENCE:.0f} s for {what}\n{logs}")
            time.sleep(pause)


METHOD = {field.name for field in fields(method_class("apfl"))}  # the others are options of the command


@contextmanager
def world(root: Path, names: Sequence[str], **options: Any) -> Iterator[World]:
    """A world that ends with the block."""
    made = World(root, names, **options)
    try:
        yield made
    finally:
        made.end()


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
