"""The cost model beside measurements: seconds and memory of a site and of the server, as ratios (target: within 30 %).

    python benchmarks/cost.py [--rows 8000] [--features 256] [--classes 10] [--clients 4] [--widths 512 1024]

Processor seconds on one thread. The rates are measured in the same process, just before.
"""

from __future__ import annotations

import argparse
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
from apfl.methods.apfl import APFL


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    made = work()
    return time.process_time() - start, made


def one(size: Size, folder: Path) -> None:
    names = tuple(f"{k:03d}" for k in range(size.classes))
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(size.classes, size.features, generator=generator)
    sites = []
    for k in range(size.clients):
        labels = torch.arange(size.own) % size.classes
        rows = centres[labels] + 2 * torch.randn(size.own, size.features, generator=generator)
        sites.append(Site(folder / "sites", f"s{k}", Shard(rows, labels), names))
    method = APFL(d_primary=int(size.width or 0), normalise="row")
    told = cost(size, method).seconds(measured_rates(clock=time.process_time), 100.0)
    found = dict.fromkeys(told, 0.0)
    with Coordinator(folder / "server", Terms("f", method=method)) as server:
        for site in sites:
            server.describe(site.describe(server.invitation()), site.name)
        outline = server.outline()
        for site in sites:
            server.spread(site.spread(outline), site.name)
        agreement = server.settle()
        for site in sites:
            site.keep_landmarks(agreement, server.landmarks())
            seconds, data = timed(lambda site=site: site.statistics(agreement))
            found["site: statistics"] += seconds / size.clients
            seconds, _ = timed(lambda site=site, data=data: server.accept(data, site.name))
            found["server: contributions"] += seconds
        found["server: publication"], _ = timed(server.publish)
        for site in sites:
            data = server.deliver(site.name)
            seconds, table = timed(lambda site=site, data=data: site.table(agreement, data))
            found["site: personal model"] += seconds / size.clients
            server.table(table, site.name)
    for name, seconds in found.items():
        if seconds:
            ratio = told[name] / seconds
            print(f"| d = {size.width} | {name} | {told[name]:.2f} s | {seconds:.2f} s | {ratio:.2f} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("rows", 8000), ("features", 256), ("classes", 10), ("clients", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--widths", type=int, nargs="+", default=[512, 1024])
    given = parser.parse_args()
    print("| width | what | model | measured | model / measured |\n| --- | --- | --- | --- | --- |")
    for width in given.widths:
        with TemporaryDirectory() as folder, threads(1):
            one(Size(given.rows, given.features, given.classes, given.clients, width), Path(folder))


if __name__ == "__main__":
    main()
