"""Throughput of the extraction as a ratio to the bare forward pass: medians of interleaved repeats in the same run.

    python benchmarks/features.py [--backbone efficientnet-lite0] [--images 96] [--batch-size 16] [--repeats 5]

bare   the network alone on one prepared batch that stays in the device's memory, as often as there are batches
ours   everything: files on disk -> decoded -> prepared -> network -> features file, a fresh one every time

``--backbone random-vit-mae-base`` is ViT-MAE-Base with random weights: the same work, no download.
"""

from __future__ import annotations

import argparse
import platform
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from timing import interleaved

from apfl.data import Samples, open_source
from apfl.data.backbones import Backbone, load_backbone
from apfl.data.device import device_of
from apfl.data.extract.features import extract

KINDS = {"32 x 32 PNG (CIFAR-100)": ((32, 32), "png"), "400 x 300 JPEG (ImageNet-R)": ((400, 300), "jpg")}


def network(name: str, folder: Path) -> Backbone:
    if name != "random-vit-mae-base":
        return load_backbone(name)
    from transformers import ViTImageProcessorPil, ViTMAEConfig, ViTMAEModel

    ViTMAEModel(ViTMAEConfig()).save_pretrained(folder)
    ViTImageProcessorPil(size={"height": 224, "width": 224}).save_pretrained(folder)
    return load_backbone(str(folder), pooling="cls")


def pictures(folder: Path, n: int, size: tuple[int, int], suffix: str) -> Samples:
    rng = np.random.default_rng(0)
    for i in range(n):
        place = folder / f"class{i % 2}"
        place.mkdir(parents=True, exist_ok=True)
        coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        coarse.resize(size, Image.Resampling.BICUBIC).save(place / f"{i}.{suffix}")
    opened = open_source(str(folder))
    assert isinstance(opened, Samples)
    return opened


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", default="efficientnet-lite0")
    parser.add_argument("--images", type=int, default=96)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="auto")
    given = parser.parse_args()
    device = device_of(given.device)
    what = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    print(f"{given.backbone}, batch {given.batch_size}, {given.images} images, {what}, torch {torch.__version__}\n")
    print("| images | ours | bare forward | ratio | target |\n| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        backbone = network(given.backbone, folder / "model")
        backbone.module.to(device)
        for kind, (size, suffix) in KINDS.items():
            samples = pictures(folder / suffix, given.images, size, suffix)
            prepared = [backbone.prepare(samples.decode(samples.fetch(i))) for i in range(given.batch_size)]
            batch = torch.stack(prepared).to(device)

            def bare(batch: torch.Tensor = batch) -> None:
                flags = torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False)
                with torch.inference_mode(), flags:
                    for _ in range(given.images // given.batch_size):
                        backbone.forward(batch)
                if device.type == "cuda":
                    torch.cuda.synchronize()

            def ours(samples: Samples = samples) -> None:
                path = folder / "features.npz"
                path.unlink(missing_ok=True)
                extract(samples, backbone, path, batch_size=given.batch_size, device=given.device)

            times = interleaved(given.repeats, ours=ours, bare=bare)
            rates = {name: given.images / seconds for name, seconds in times.items()}
            ratio = rates["ours"] / rates["bare"]
            print(f"| {kind} | {rates['ours']:.1f}/s | {rates['bare']:.1f}/s | {ratio:.2f} | ≥ 0.85 |", flush=True)


if __name__ == "__main__":
    main()
