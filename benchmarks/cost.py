"""The cost model beside measurements: seconds and memory of a site and of the server, as ratios (target: within 30 %).

    python benchmarks/cost.py [--rows 8000] [--features 256] [--classes 10] [--clients 4] [--widths 512 1024]

Processor seconds on one thread. The rates are measured in the same process, just before.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from apfl.data.federation import Shard
from apfl.experiments.cost import RUN, cost
from apfl.experiments.operations import Size
from apfl.experiments.rates import measured_rates
from apfl.federate import Coordinator, Site, Terms
from apfl.maths.machine import threads
from apfl.maths.memory import INTERPRETER, of_pilot
from apfl.maths.pilot import n_points, rows_of_pilot
from apfl.methods.apfl import APFL

PARTS = ("pilot", "federation", "run")  # the pilot, all that follows it, and everyone in one process


class Meter:
    """Processor seconds and peak memory of what one party does, over what the process held when it began."""

    def __init__(self) -> None:
        self.peak = {"site": 0, "server": 0}

    def __call__(self, party: str, work: Callable[[], Any]) -> tuple[float, Any]:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # memory that is free counts as not held
        Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
        held, start = _status("VmRSS"), time.process_time()
        made = work()
        seconds = time.process_time() - start
        self.peak[party] = max(self.peak[party], _status("VmHWM") - held)
        return seconds, made


def _status(key: str) -> int:
    """Bytes, of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))


def drawn(size: Size) -> list[Shard]:
    """Rows of equally large sites."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(size.classes, size.features, generator=generator)
    labels = torch.arange(size.own) % size.classes
    return [
        Shard(centres[labels] + 2 * torch.randn(size.own, size.features, generator=generator), labels)
        for _ in range(size.clients)
    ]


def one(size: Size, folder: Path, part: str) -> None:
    """A part in a process of its own, since memory that is held counts for none."""
    method = APFL(map="landmarks", d_primary=int(size.width or 0), normalise="row" if part == "federation" else "auto")
    made, clients, meter = cost(size, method), drawn(size), Meter()
    told = made.seconds(measured_rates(int(size.width or 0)), 100.0)
    found = dict.fromkeys(told, 0.0)
    if part == "run":
        found[RUN], _ = meter("site", lambda: [*method.rounds(clients, size.classes, 0)])
        told_of(size, told, found, {}, meter)
        return
    names = tuple(f"{k:03d}" for k in range(size.classes))
    sites = [Site(folder / "sites", f"s{k}", shard, names) for k, shard in enumerate(clients)]
    with Coordinator(folder / "server", Terms("f", method=method)) as server:
        for site in sites:
            server.describe(site.describe(server.invitation()), site.name)
        if part == "pilot":
            tried(server, sites, meter, found)
            told_of(size, told, found, _pilot_memory(size), meter)
            return
        outline = server.outline()
        if server.spreading:
            for site in sites:
                seconds, data = meter("site", lambda site=site: site.spread(outline))
                found["site: moments"] += seconds / size.clients
                server.spread(data, site.name)
        found["server: landmarks"], agreement = meter("server", server.settle)
        for site in sites:
            site.keep_landmarks(agreement, server.landmarks())
            seconds, data = meter("site", lambda site=site: site.statistics(agreement))
            found["site: statistics"] += seconds / size.clients
            seconds, _ = meter("server", lambda site=site, data=data: server.accept(data, site.name))
            found["server: contributions"] += seconds
        found["server: publication"], _ = meter("server", server.publish)
        for site in sites:
            data = server.deliver(site.name)
            seconds, table = meter("site", lambda site=site, data=data: site.table(agreement, data))
            found["site: personal model"] += seconds / size.clients
            server.table(table, site.name)
        choice = server.choose()
        for site in sites:
            data = server.deliver(site.name)
            seconds, _ = meter("site", lambda site=site, data=data: site.refine(agreement, data, choice))
            found["site: personal model"] += seconds / size.clients
    memory = {"site": made.site_memory - INTERPRETER, "server": made.server_memory - INTERPRETER}
    told_of(size, told, found, memory, meter)


def tried(server: Coordinator, sites: list[Site], meter: Meter, found: dict[str, float]) -> None:
    """The pilot."""
    found["server: pilot"], trial = meter("server", server.trial)
    for site in sites:
        question = server.pilot_question()
        seconds, data = meter("site", partial(site.pilot, trial, question))
        found["site: pilot"] += seconds / len(sites)
        found["server: pilot"] += meter("server", partial(server.pilot_statistics, data, site.name))[0]
    found["server: pilot"] += meter("server", server.pilot_primaries)[0]
    for site in sites:
        seconds, table = meter("site", partial(site.pilot_table, trial, server.pilot_primaries(site.name)))
        found["site: pilot"] += seconds / len(sites)
        server.pilot_table(table, site.name)


def _pilot_memory(size: Size) -> dict[str, int]:
    site, server = of_pilot(n_points(size.rows), rows_of_pilot(size.own, size.rows), size.features)
    return {"site": site, "server": server}


def told_of(size: Size, told: dict[str, float], found: dict[str, float], memory: dict[str, int], meter: Meter) -> None:
    """The lines of the table."""
    for name, most in told.items():
        if found[name] and most:
            ratio = most / found[name]
            print(f"| {told_size(size)} | {name} | {most:.3f} s | {found[name]:.3f} s | {ratio:.2f} |", flush=True)
    for party, most in memory.items():
        peak = meter.peak[party]
        sizes = f"{most / 1e6:.0f} MB | {peak / 1e6:.0f} MB"
        print(f"| {told_size(size)} | {party}: memory over that of Python | {sizes} | {most / peak:.2f} |", flush=True)


def told_size(size: Size) -> str:
    return f"{size.rows} x {size.features}, c = {size.classes}, K = {size.clients}, d = {size.width}"


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("rows", 8000), ("features", 256), ("classes", 10), ("clients", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--widths", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--one", choices=PARTS, help="of the first width, in this process")
    given = parser.parse_args()
    if given.one:
        with TemporaryDirectory() as folder, threads(1):
            size = Size(given.rows, given.features, given.classes, given.clients, given.widths[0])
            one(size, Path(folder), given.one)
        return
    print("| setting | what | model | measured | model / measured |\n| --- | --- | --- | --- | --- |", flush=True)
    for width in given.widths:  # each in a process of its own, whose memory has held nothing before
        names = ("rows", "features", "classes", "clients")
        size = [each for name in names for each in (f"--{name}", str(vars(given)[name]))]
        for part in PARTS:
            subprocess.run([sys.executable, __file__, "--one", part, *size, "--widths", str(width)], check=True)


if __name__ == "__main__":
    main()
