"""`apfl stats` on Parquet shards, as a ratio to reading them and multiplying bare, with its peak memory.

    python benchmarks/stats.py [--rows 300000] [--features 256] [--width 1024] [--classes 10] [--shards 6]

bare     pyarrow reads the same columns; the products of the map (rows times landmarks, substitution), the kernel in
         between, Phi'Phi and Phi'Y in float64, and nothing else
memory   peak resident bytes of each process, beside what `pass_bytes` says
"""

from __future__ import annotations

import argparse
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
        x = rng.normal(size=(rows // shards, features)).astype(np.float32)
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


def one(which: str, folder: Path) -> None:
    """Run in a process of its own: seconds and peak memory."""
    terms, landmarks = Terms.from_json((folder / "terms.json").read_bytes()), (folder / "landmarks").read_bytes()
    files = sorted(folder.glob("*.parquet"))
    open_landmarks(landmarks, terms).feature_map._factor  # noqa: B018 (made once, in both)
    start = time.perf_counter()
    if which == "bare":
        bare(files, terms, landmarks)
    else:
        Pass(stage_of(terms, landmarks), files, folder / "part.safetensors").run()
    print(time.perf_counter() - start, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("rows", 300_000), ("features", 256), ("width", 1024), ("classes", 10), ("shards", 6)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--one", nargs=2)
    given = parser.parse_args()
    if given.one:
        one(given.one[0], Path(given.one[1]))
        return
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        terms, landmarks = agreed(given.rows, given.features, given.width, given.classes)
        (folder / "terms.json").write_text(terms.to_json())
        (folder / "landmarks").write_bytes(landmarks)
        write(folder, given.rows, given.features, given.classes, given.shards)
        found = {}
        for which in ("bare", "stats"):
            command = [sys.executable, __file__, "--one", which, temporary]
            found[which] = tuple(map(float, subprocess.run(command, check=True, capture_output=True).stdout.split()))
        told = pass_bytes(terms, given.features, parquet=True)
        (seconds, peak), (peer, _) = found["stats"], found["bare"]
        print(f"{given.rows} rows x {given.features}, d = {terms.width}: {seconds:.1f} s, bare {peer:.1f} s, "
              f"ratio {seconds / peer:.2f}; peak {peak / 1e6:.0f} MB, said {told / 1e6:.0f} MB")  # fmt: skip


if __name__ == "__main__":
    main()
