"""How time and memory grow with clients and rows: fitted exponents, and a picture.

    python benchmarks/scale.py [--clients 100 1000 10000] [--rows 4000 16000 64000] [--records FILE] [--plot FILE]

federation   the in-process federation with so many clients, through the bytes that would travel; a client's rows are
             drawn when it is its turn, so that the process holds the server and one client
run          what `apfl run` does with so many clients, in memory: training, and the accuracy of every client
rows         the same with 20 clients and so many rows
split        the same with the rows of 10,000 clients, split among so many: what clients take, apart from their rows

Clients have 8 to 400 rows, 20 on average (log-normal). Processor seconds of a process of its own for each number, on
one thread, and its peak memory. An exponent is the slope of a line through the logarithms, after the seconds that the
smallest case takes to start are taken off: those of importing and of drawing a map, which do not depend on clients.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

FEATURES, CLASSES, WIDTH = 16, 4, 64
NAMES = tuple(f"class {k}" for k in range(CLASSES))
FEW = {"federation": 3, "run": 3, "rows": 400, "split": 20}  # the case whose seconds are those of starting


def sizes(n_clients: int) -> Any:
    import numpy as np

    return np.clip(np.random.default_rng(0).lognormal(2.6, 0.8, n_clients), 8, 400).astype(int)


def rows_of(client: int, n: int) -> Any:
    import torch

    from apfl.data.federation import Shard

    centres = torch.randn(CLASSES, FEATURES, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1 + client)
    labels = torch.arange(n) % CLASSES  # two of each class at least, which a client may contribute
    return Shard(centres[labels] + 1.5 * torch.randn(n, FEATURES, generator=generator), labels)


class Sites(Sequence[Any]):
    """Clients that are made when they are asked for; what they remember is in their folders."""

    def __init__(self, folder: Path, n_clients: int) -> None:
        self.folder, self.sizes = folder, sizes(n_clients)

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, k: Any) -> Any:
        from apfl.federate import Site

        return Site(self.folder, f"s{k:06d}", rows_of(k, int(self.sizes[k])), NAMES)

    def __iter__(self) -> Iterator[Any]:
        return (self[k] for k in range(len(self)))


def federation(n_clients: int) -> dict[str, Any]:
    from apfl.federate import Terms
    from apfl.federate.inprocess import simulate
    from apfl.methods.apfl import APFL

    terms = Terms("f", method=APFL(map="landmarks", d_primary=WIDTH, normalise="row"), keep_contributions=False)
    with TemporaryDirectory() as folder:
        sites = Sites(Path(folder) / "sites", n_clients)
        start = time.process_time()
        done = simulate(sites, terms, Path(folder) / "server")
        seconds = time.process_time() - start
    return {"seconds": seconds, "rows": int(sites.sizes.sum()), "bytes_down": done.bytes_down, "up": done.bytes_up}


def in_memory(own: Any) -> dict[str, Any]:
    from apfl.experiments.metrics import client_accuracies
    from apfl.methods.apfl import APFL

    train = [rows_of(k, int(n)) for k, n in enumerate(own)]
    test = [rows_of(1_000_000 + k, 5) for k in range(len(own))]
    method = APFL(map="landmarks", d_primary=WIDTH, normalise="row")
    start = time.process_time()
    (*_, last) = method.rounds(train, CLASSES, 0)
    client_accuracies(last.models, test)
    return {"seconds": time.process_time() - start, "rows": int(sum(own))}


def split(n_clients: int) -> Any:
    """The sizes of so many clients with as many rows as 10,000 have, give or take one a client."""
    own = sizes(n_clients)
    return (own * (sizes(10_000).sum() / own.sum())).round().astype(int)


def one(what: str, n: int) -> None:
    """In a process of its own."""
    import torch

    torch.set_num_threads(1)
    own = {"rows": lambda n: [n // 20] * 20, "run": sizes, "split": split}
    made = in_memory(own[what](n)) if what in own else federation(n)
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"what": what, "n": n, **made, "peak_bytes": peak}))


def exponent(records: Sequence[dict[str, Any]], what: str) -> float:
    import numpy as np

    mine = sorted((each["n"], each["seconds"]) for each in records if each["what"] == what)
    start = mine[0][1]
    n, seconds = np.array(mine[1:]).T
    return float(np.polyfit(np.log(n), np.log(seconds - start), 1)[0])


def plot(records: Sequence[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "apfl"
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    for what, label in (("federation", "in-process federation"), ("run", "in memory, as apfl run")):
        mine = sorted((r["n"], r["seconds"], r["peak_bytes"]) for r in records if r["what"] == what and r["n"] >= 100)
        n, seconds, peak = zip(*mine, strict=True)
        left.loglog(n, seconds, "o-", label=f"{label}: K^{exponent(records, what):.2f}")
        right.semilogx(n, [each / 1e6 for each in peak], "o-", label=label)
    left.set(xlabel="clients", ylabel="processor seconds")
    right.set(xlabel="clients", ylabel="peak memory, MB", ylim=(0, None))
    left.legend(fontsize=8)
    right.legend(fontsize=8)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="*", default=[100, 1000, 10_000])
    parser.add_argument("--rows", type=int, nargs="*", default=[4000, 16_000, 64_000])
    parser.add_argument("--what", nargs="*", default=["federation", "run", "rows", "split"])
    parser.add_argument("--records", type=Path, help="JSON lines to add to, and to read for the fits")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--one", nargs=2)
    given = parser.parse_args()
    if given.one:
        one(given.one[0], int(given.one[1]))
        return
    records = [json.loads(line) for line in given.records.read_text().splitlines()] if _there(given.records) else []
    for what in given.what:
        for n in [FEW[what], *(given.rows if what == "rows" else given.clients)]:
            if any((each["what"], each["n"]) == (what, n) for each in records):
                continue
            command = [sys.executable, __file__, "--one", what, str(n)]
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
            records.append(json.loads(told.splitlines()[-1]))
            print(json.dumps(records[-1]), flush=True)
            if given.records:
                with given.records.open("a") as file:
                    file.write(f"{json.dumps(records[-1])}\n")
    for what in given.what:
        if what != "split":  # its rows stay as many
            print(f"{what}: exponent {exponent(records, what):.2f}")
    if given.plot:
        plot(records, given.plot)


def _there(path: Path | None) -> bool:
    return path is not None and path.is_file()


if __name__ == "__main__":
    main()
