"""Kills coordinators for `test_deploy_crash`: run as a script, so that nothing of the test process is in the way.

    python -m tests.federate.killed steps keep|sum STRIDE    before flushes, renames, deletions and SQL of a whole run
    python -m tests.federate.killed random keep|sum STRIDE   at random moments, 100 / STRIDE of them
    python -m tests.federate.killed memory N D keep|sum      no kills: N contributions of width D; the peak memory

Each victim is a process of its own, killed by SIGKILL. Another one then goes on from the folder. Prints JSON.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from apfl.data.federation import Shard
from apfl.federate import Coordinator, Site, Terms
from apfl.federate.contribution import encode
from apfl.federate.messages import open_choice
from apfl.federate.terms import Description, settle
from apfl.federate.wire import sha256
from apfl.methods.apfl import APFL
from tests.federate.federation_toys import AUTO, LANDMARKS, NAMES, PILOT, make_sites, seen

LEAVES = "site-2"
SHM = "/dev/shm"


class Told:
    """What the coordinator has acknowledged, on disk before the next thing is done, as a client would remember it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def note(self, what: str, name: str) -> None:
        with self.path.open("a") as file:
            file.write(f"{what} {name}\n")

    def lines(self) -> list[str]:
        return self.path.read_text().splitlines() if self.path.exists() else []


def drive_pilot(server: Coordinator, sites: list[Site], told: Told, asked: Callable[[str, Site], None]) -> None:
    """The pilot, from wherever it stands."""
    trial = server.trial()
    if server.piloting == "statistics":
        for site in sites:
            if site.name not in server.ledger.piloted("statistics"):
                asked("trial", site)
                assert server.pilot_statistics(site.pilot(trial, server.pilot_question()), site.name).ok
                told.note("trial", site.name)
    server.pilot_primaries()
    for site in sites:
        if site.name not in server.ledger.piloted("table"):
            asked("hits", site)
            assert server.pilot_table(site.pilot_table(trial, server.pilot_primaries(site.name)), site.name).ok
            told.note("hits", site.name)


def drive(
    folder: Path, sites: list[Site], keep: bool, told: Told, on_open: Callable[[Coordinator], None], method: APFL = AUTO
) -> Any:
    """A whole federation, as a transport would drive it: whatever is there already is not asked for again."""
    terms = Terms("f", method=method, class_names=NAMES, quorum=3, keep_contributions=keep)
    server = Coordinator(folder, terms)
    on_open(server)
    state = {row["name"]: row for row in server.status()["clients"]}
    gone = state.get(LEAVES, {}).get("state") == "gone"

    def asked(what: str, site: Site) -> None:
        assert f"{what} {site.name}" not in told.lines(), f"{site.name} was asked again for its {what}"

    if not (server.settled or server.spreading or server.piloting):
        for site in sites:
            if state.get(site.name, {}).get("described") is None:
                asked("description", site)
                assert server.describe(site.describe(server.invitation()), site.name).ok
                told.note("description", site.name)
    if terms.pilots and not (server.settled or server.spreading):
        drive_pilot(server, sites, told, asked)
    if terms.landmarked and not server.settled:
        outline = server.outline()
        for site in sites:
            if site.name not in server.ledger.answered("spreads"):
                asked("spread", site)
                assert server.spread(site.spread(outline), site.name).ok
                told.note("spread", site.name)
    agreement = server.settle()
    for site in sites if terms.landmarked else ():
        site.keep_landmarks(agreement, server.landmarks())
    for site in sites:
        if site.name == LEAVES and gone:
            continue
        if server.contribution_of(site.name) is None:
            asked("contribution", site)
            assert server.accept(site.statistics(agreement), site.name).ok
            told.note("contribution", site.name)
    if server.ready():
        server.publish()
    if not gone:
        server.leave(LEAVES, None if keep else sites[2].sent(agreement))
    elif server.ready():
        server.publish()
    rest = [site for site in sites if site.name != LEAVES]
    current = server.current()
    assert current is not None
    have = server.status()["tables"]
    for site in rest:
        if site.name not in have:
            asked(f"table-{current.number}", site)
            assert server.table(site.table(agreement, server.deliver(site.name)), site.name).ok
            told.note(f"table-{current.number}", site.name)
    choice = open_choice(server.choose(), server.terms)
    broadcast = seen(current, server.terms)
    files = sorted(path.name for path in (folder / "blobs").iterdir())
    expected = sorted(server.ledger.referred())
    server.close()
    assert files == expected, (files, expected)
    return {
        "weights": sha256(broadcast.weights.numpy().tobytes()), "members": sorted(current.members),
        "gamma": broadcast.gamma, "setting": list(choice.setting), "n": choice.n_samples,
        "contributions": len([name for name in files if name.startswith("contribution")]),
    }  # fmt: skip


def count_steps(kill_at: int, counted: list[int]) -> Callable[[Coordinator], None]:
    """From now on count everything that changes the disk, and kill this process at one of them."""

    def step(*_: Any) -> None:
        counted[0] += 1
        if counted[0] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def before(call: Callable[..., Any]) -> Callable[..., Any]:
        def stepped(*args: Any, **kwargs: Any) -> Any:
            step()
            return call(*args, **kwargs)

        return stepped

    for name in ("fsync", "replace", "unlink"):
        setattr(os, name, before(getattr(os, name)))
    return lambda server: server.ledger.db.set_trace_callback(step)


def in_child(work: Callable[[], Any], kill_after: float | None = None) -> tuple[int, Any]:
    """Exit signal and result of some work in a process of its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        code = 1
        try:
            os.write(writer, json.dumps(work()).encode())
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    said = os.fdopen(reader, "rb").read()
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "a child failed; see its traceback above"
    return (os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0), (json.loads(said) if said else None)


def kill(how: str, keep: bool, stride: int, method: APFL) -> dict[str, Any]:
    # A kill loses nothing that was written, so memory will do as a disk, and is faster.
    home = Path(mkdtemp(dir=SHM if Path(SHM).is_dir() else None))
    sites = make_sites(home, (30, 45, 20, 50))
    counted = [0]
    in_child(lambda: drive(home / "first", sites, keep, Told(home / "first.txt"), lambda server: None, method))

    def uninterrupted() -> Any:
        on_open = count_steps(0, counted)
        return drive(home / "plain", sites, keep, Told(home / "plain.txt"), on_open, method), counted[0]

    began = time.monotonic()
    expected, n_steps = in_child(uninterrupted)[1]
    seconds = time.monotonic() - began
    moments = range(1, n_steps + 1, stride) if how == "steps" else range(0, 100, stride)
    rng, killed, wrong = random.Random(0), 0, []
    for moment in moments:
        folder, told = home / "server", Told(home / "told.txt")

        def victim(moment: int = moment, folder: Path = folder, told: Told = told) -> Any:
            on_open = count_steps(moment, [0]) if how == "steps" else (lambda server: None)
            return drive(folder, sites, keep, told, on_open, method)

        after = None if how == "steps" else rng.uniform(0, 1.1 * seconds)
        died, _ = in_child(victim, after)
        killed += died == signal.SIGKILL
        again = partial(drive, folder, sites, keep, told, lambda server: None, method)
        _, result = in_child(again)
        if result != expected:
            wrong.append(moment)
        shutil.rmtree(folder)
        told.path.unlink(missing_ok=True)
    shutil.rmtree(home)
    return {"moments": len(moments), "killed": killed, "wrong": wrong, **expected}


def memory(n_clients: int, width: int, keep: bool) -> dict[str, Any]:
    """Peak memory of a coordinator that takes this many contributions, each made, sent and dropped."""
    home = Path(mkdtemp(dir=SHM if Path(SHM).is_dir() else None))
    method = APFL(map="random", d_primary=width, gamma=1.0, normalise="root")
    draft = Terms("f", method=method, class_names=NAMES, n_features=16, quorum=1, keep_contributions=keep)
    with Coordinator(home / "server", draft) as server:
        first = Site(home / "site", "site-0", Shard(torch.randn(20, 16), torch.arange(20) % 3), NAMES)
        server.describe(first.describe(server.invitation()))
        terms = Terms.from_json(server.settle())
        assert terms == settle(draft, [Description("site-0", 20, 16, NAMES)])
        rows = terms.normaliser()(first.train.features)
        data = encode(terms.maps(rows)[0](rows), first.train.labels, terms, "site-0000")
        for k in range(n_clients):  # the server does not know that they all have the same rows
            assert server.accept(data.replace(b"site-0000", f"site-{k:04}".encode())).outcome == "accepted"
        assert len(server.publish().members) == n_clients
    shutil.rmtree(home)
    return {"peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, *rest = sys.argv[1:]
    if what == "memory":
        print(json.dumps(memory(int(rest[0]), int(rest[1]), rest[2] == "keep")))
    else:
        method = PILOT if "pilot" in rest else LANDMARKS if "landmarks" in rest else AUTO
        print(json.dumps(kill(what, rest[0] == "keep", int(rest[1]), method)))
