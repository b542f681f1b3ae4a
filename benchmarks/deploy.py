"""What one client's contribution takes, in bytes and seconds: triangle and factor, double and single precision.

    python benchmarks/deploy.py [--widths 1024,2048,4096,8192] [--features 1280] [--classes 100]

client   draws and applies the map, adds rows up or factorises them, packs, and checks what it made as the server will
server   reads and checks the contribution and writes it down; then adds it to the sum

The factor is what a client with 450 rows sends, the triangle one with 5/4 d rows. Seconds are those of the processor,
on one thread, so that they mean the same on a busy machine; waiting for disk and network is not in them. Each line is
one run in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from threadpoolctl import threadpool_limits

from apfl.data.federation import Shard
from apfl.federate import Coordinator, Site, Terms
from apfl.methods.apfl import APFL

FEW = 450


def one(width: int, wire: str, n_rows: int, n_features: int, n_classes: int) -> dict[str, Any]:
    """Seconds, bytes and peak memory of one contribution."""
    rows = torch.randn(n_rows, n_features, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(n_rows) % n_classes
    names = tuple(f"class-{k:03}" for k in range(n_classes))
    terms = Terms("bench", method=APFL(map="random", d_primary=width, d_refinement=64, gamma=1.0), wire=wire, quorum=1)
    with TemporaryDirectory() as folder, Coordinator(Path(folder) / "server", terms) as server:
        site = Site(Path(folder) / "site", "site", Shard(rows, labels), names)
        server.describe(site.describe(server.invitation()))
        agreement = server.settle()
        sent, client = timed(lambda: site.statistics(agreement))
        _, accept = timed(lambda: server.accept(sent))
        _, fold = timed(server.pool.fold)
        (row,) = server.status()["clients"]
        assert row["state"] == "member"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2
    return {"form": row["form"], "bytes": len(sent), "client": client, "accept": accept, "fold": fold, "peak_gb": peak}


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    start = time.process_time()
    result = call()
    return result, time.process_time() - start


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--widths", default="1024,2048,4096,8192")
    options.add_argument("--features", type=int, default=1280)
    options.add_argument("--classes", type=int, default=100)
    options.add_argument("--one", nargs=3, metavar=("WIDTH", "WIRE", "ROWS"), help="one line, as JSON")
    given = options.parse_args()
    if given.one:
        width, wire, n_rows = given.one
        torch.set_num_threads(1)
        threadpool_limits(1)
        print(json.dumps(one(int(width), wire, int(n_rows), given.features, given.classes)))
        return
    print("| d | rows | form | wire | MB | client, s | server: check, s | server: add, s | peak memory, GB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for width in map(int, given.widths.split(",")):
        for n_rows in (FEW, width * 5 // 4):
            for wire in ("float64", "float32"):
                command = [sys.executable, __file__, "--features", str(given.features), "--classes", str(given.classes)]
                command += ["--one", str(width), wire, str(n_rows)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                m = json.loads(done.stdout)
                print(
                    f"| {width} | {n_rows} | {m['form']} | {wire} | {m['bytes'] / 1e6:.1f} | {m['client']:.2f} "
                    f"| {m['accept']:.2f} | {m['fold']:.2f} | {m['peak_gb']:.1f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
