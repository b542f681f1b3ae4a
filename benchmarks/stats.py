"""`apfl stats` on Parquet shards, as a ratio to reading them and multiplying bare, with its peak memory.

    python benchmarks/stats.py [--rows 300000] [--features 256] [--width 1024] [--classes 10] [--shards 6] [--threads 1]

Prints JSON: wall seconds, and processor seconds of all threads, which hardly depend on who else uses the machine.

bare     pyarrow reads the same columns; the products of the map (rows times landmarks, substitution), the kernel in
         between, Phi'Phi and Phi'Y in float64, and nothing else
memory   peak resident bytes of each process, beside what `pass_bytes` says
order    with --again: whether the shards the other way round give the same bytes
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from apfl.federate.landmarks import draw, open_landmarks
from apfl.federate.stats.passes import Pass, batch_rows, pass_bytes
from apfl.federate.stats.stages import stage_of
from apfl.federate.terms import Description, Terms, settle
from apfl.maths.landmarks import kernel
from apfl.maths.machine import threads
from apfl.maths.ridge import one_hot, squared
from apfl.methods.apfl import APFL


def agreed(rows: int, features: int, width: int, classes: int) -> tuple[Terms, bytes]:
    """Settled terms with landmarks that nobody's rows decide."""
    method = APFL(d_primary=width, landmarks="free", normalise="row")
    names = tuple(f"class {k:03d}" for k in range(classes))
    outline = settle(Terms("f", method=method), [Description(name, rows, features, names) for name in "ab"])
    return draw(replace(outline), [])


def write(folder: Path, rows: int, features: int, classes: int, shards: int) -> list[Path]:
    rng, made = np.random.default_rng(0), []
    for k in range(shards):
        x = rng.standard_normal((rows // shards, features), np.float32)
        labels = [f"class {each:03d}" for each in rng.integers(classes, size=len(x))]
        made.append(folder / f"{k}.parquet")
        pq.write_table(pa.table({**{f"f{i}": x[:, i] for i in range(features)}, "label": labels}), made[-1])
    return made


def bare(files: list[Path], terms: Terms, landmarks: bytes) -> None:
    drawn = open_landmarks(landmarks, terms).feature_map
    v, factor = drawn.landmarks, drawn._factor
    size, n = batch_rows(terms.width, terms.n_features or 0), terms.n_features or 0
    system, cross = torch.zeros_like(factor), torch.zeros(terms.width, terms.n_classes, dtype=torch.float64)
    for path in files:
        for batch in pq.ParquetFile(path).iter_batches(batch_size=size):
            x = torch.from_numpy(np.stack([batch.column(i).to_numpy() for i in range(n)], 1)).double()
            labels = torch.from_numpy(batch.column("label").dictionary_encode().indices.to_numpy().astype(np.int64))
            x /= torch.linalg.vector_norm(x, dim=1, keepdim=True)
            phi = torch.linalg.solve_triangular(factor, kernel(x, v).T, upper=False).T
            system += squared(phi)
            cross += phi.T @ one_hot(labels, terms.n_classes)


def one(which: str, folder: Path, n_threads: int | None) -> None:
    """Run in a process of its own: seconds, processor seconds and peak memory."""
    terms, landmarks = Terms.from_json((folder / "terms.json").read_bytes()), (folder / "landmarks").read_bytes()
    files = sorted(folder.glob("*.parquet"))
    open_landmarks(landmarks, terms).feature_map._factor  # noqa: B018 (made once, in both)
    wall, processor = time.perf_counter(), time.process_time()
    if which == "bare":
        with threads(n_threads):
            bare(files, terms, landmarks)
    else:
        order = files[::-1] if which == "again" else files
        Pass(stage_of(terms, landmarks), order, folder / f"{which}.safetensors", n_threads=n_threads).run()
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"wall": time.perf_counter() - wall, "processor": time.process_time() - processor, "peak": peak}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rows", 300_000), ("features", 256), ("width", 1024), ("classes", 10), ("shards", 6)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--threads", type=int, help="of both; default: one for each core")
    parser.add_argument("--again", action="store_true", help="sum the shards the other way round, and compare")
    parser.add_argument("--one", nargs=2)
    given = parser.parse_args()
    if given.one:
        one(given.one[0], Path(given.one[1]), given.threads)
        return
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        terms, landmarks = agreed(given.rows, given.features, given.width, given.classes)
        (folder / "terms.json").write_text(terms.to_json())
        (folder / "landmarks").write_bytes(landmarks)
        files = write(folder, given.rows, given.features, given.classes, given.shards)
        found: dict[str, object] = {
            "rows": given.rows, "features": given.features, "d": terms.width, "shards": given.shards,
            "parquet_bytes": sum(path.stat().st_size for path in files), "threads": given.threads,
        }  # fmt: skip
        took = {}
        for which in ("bare", "stats", *(["again"] if given.again else [])):
            command = [sys.executable, __file__, "--one", which, temporary]
            command += ["--threads", str(given.threads)] if given.threads else []
            took[which] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        found |= {**took, "said": pass_bytes(terms, given.features, parquet=True)}
        found |= {f"ratio, {clock}": took["stats"][clock] / took["bare"][clock] for clock in ("wall", "processor")}
        if given.again:
            one_way, other = (folder / f"{which}.safetensors" for which in ("stats", "again"))
            found["same bytes in another order"] = one_way.read_bytes() == other.read_bytes()
        print(json.dumps(found))


if __name__ == "__main__":
    main()
