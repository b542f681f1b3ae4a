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
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from apfl.data.federation import Shard
from apfl.experiments.cost import Size, cost, measured_rates
from apfl.federate import Coordinator, Site, Terms
from apfl.maths.machine import threads
from apfl.maths.memory import INTERPRETER
from apfl.methods.apfl import APFL


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


def one(size: Size, folder: Path) -> None:
    names = tuple(f"{k:03d}" for k in range(size.classes))
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(size.classes, size.features, generator=generator)
    sites = []
    for k in range(size.clients):
        labels = torch.arange(size.own) % size.classes
        rows = centres[labels] + 2 * torch.randn(size.own, size.features, generator=generator)
        sites.append(Site(folder / "sites", f"s{k}", Shard(rows, labels), names))
    method = APFL(map="landmarks", d_primary=int(size.width or 0), normalise="row")
    made = cost(size, method)
    told = made.seconds(measured_rates(int(size.width or 0), time.process_time), 100.0)
    found = dict.fromkeys(told, 0.0)
    meter = Meter()
    with Coordinator(folder / "server", Terms("f", method=method)) as server:
        for site in sites:
            server.describe(site.describe(server.invitation()), site.name)
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
    for name, seconds in found.items():
        if seconds and told[name]:
            ratio = told[name] / seconds
            print(f"| {told_size(size)} | {name} | {told[name]:.3f} s | {seconds:.3f} s | {ratio:.2f} |", flush=True)
    for party, memory in (("site", made.site_memory), ("server", made.server_memory)):
        most, peak = memory - INTERPRETER, meter.peak[party]
        sizes = f"{most / 1e6:.0f} MB | {peak / 1e6:.0f} MB"
        print(f"| {told_size(size)} | {party}: memory over that of Python | {sizes} | {most / peak:.2f} |", flush=True)


def told_size(size: Size) -> str:
    return f"{size.rows} x {size.features}, c = {size.classes}, K = {size.clients}, d = {size.width}"


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("rows", 8000), ("features", 256), ("classes", 10), ("clients", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--widths", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--one", action="store_true", help="the first width, in this process")
    given = parser.parse_args()
    if given.one:
        with TemporaryDirectory() as folder, threads(1):
            one(Size(given.rows, given.features, given.classes, given.clients, given.widths[0]), Path(folder))
        return
    print("| setting | what | model | measured | model / measured |\n| --- | --- | --- | --- | --- |", flush=True)
    for width in given.widths:  # each in a process of its own, whose memory has held nothing before
        names = ("rows", "features", "classes", "clients")
        size = [each for name in names for each in (f"--{name}", str(vars(given)[name]))]
        subprocess.run([sys.executable, __file__, "--one", *size, "--widths", str(width)], check=True)


if __name__ == "__main__":
    main()
