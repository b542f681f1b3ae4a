"""Pictures, networks and files that the tests of images make for themselves."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from apfl.data.backbones import Backbone, weights_sha256
from apfl.data.samples import Samples, decode


def pixels(row: int, height: int = 24, width: int = 32, colour: int = 0) -> np.ndarray:
    """Noise on a colour: enough for any backbone to tell the classes apart."""
    noise = np.random.default_rng(row).integers(0, 90, (height, width, 3))
    noise[..., colour] += 150
    return noise.astype(np.uint8)


def folder_of_images(root: Path, classes: int = 3, each: int = 6, domains: tuple[str, ...] = ()) -> Path:
    for domain in domains or ("",):
        for label in range(classes):
            place = root / domain / f"class{label}"
            place.mkdir(parents=True)
            for i in range(each):
                Image.fromarray(pixels(100 * label + i, colour=label)).save(place / f"{i:03}.png")
    return root


def toy_samples(n: int = 40, pause: float = 0.0, **changes: object) -> Samples:
    def fetch(row: int) -> np.ndarray:
        time.sleep(pause)  # a slow disk
        return pixels(row)

    settings = {
        "name": "toy",
        "kind": "images",
        "revision": "1",
        "labels": np.arange(n) % 3,
        "class_names": ("a", "b", "c"),
        "fetch": fetch,
        "decode": decode,
        "where": lambda row: f"toy row {row}",
    }
    return Samples(**{**settings, **changes})  # type: ignore[arg-type]


def toy_backbone(side: int = 16, seed: int = 0, **changes: object) -> Backbone:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Conv2d(3, 8, 5), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()).eval()

    def prepare(image: Image.Image) -> torch.Tensor:
        return torch.from_numpy(np.array(image.resize((side, side)), np.float32)).permute(2, 0, 1) / 255

    settings = {
        "name": "toy",
        "takes": "images",
        "weights": weights_sha256(module),
        "preprocessing": {"side": side},
        "pooling": "mean",
        "module": module,
        "prepare": prepare,
        "forward": module,
    }
    return Backbone(**{**settings, **changes})  # type: ignore[arg-type]


def tiny_mae(folder: Path, image_size: int = 32) -> Path:
    """A randomly initialised ViT-MAE with its image processor, as ``save_pretrained`` writes them."""
    from transformers import ViTImageProcessorPil, ViTMAEConfig, ViTMAEModel

    torch.manual_seed(0)
    config = ViTMAEConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        image_size=image_size, patch_size=8, initializer_range=0.5,
    )  # fmt: skip
    ViTMAEModel(config).save_pretrained(folder)
    ViTImageProcessorPil(size={"height": image_size, "width": image_size}).save_pretrained(folder)
    return folder


def saved_dataset(folder: Path, image: str = "img", label: str = "fine_label", n: int = 60) -> Path:
    """Two splits of labelled images in a folder, as ``datasets`` writes them."""
    import datasets

    features = datasets.Features({image: datasets.Image(), label: datasets.ClassLabel(names=["apple", "bear", "cup"])})

    def rows(start: int, stop: int) -> datasets.Dataset:
        labels = [i % 3 for i in range(start, stop)]
        images = [Image.fromarray(pixels(i, colour=i % 3)) for i in range(start, stop)]
        return datasets.Dataset.from_dict({image: images, label: labels}, features=features)

    datasets.DatasetDict(train=rows(0, n - n // 3), test=rows(n - n // 3, n)).save_to_disk(str(folder))
    return folder
