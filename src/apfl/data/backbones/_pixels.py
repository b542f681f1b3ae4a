"""Images to the inputs of a vision model, in two steps: 8-bit pixels on the CPU, numbers on the model's device.

An image processor resizes an image to 8 bits, and then scales and normalises every pixel by itself: the second step
maps 256 values for each channel, which a table of the processor's own results does to the last bit. Half of the work is
then done by the device, on a quarter of the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from apfl.errors import optional

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["preparation"]

NUMBERS = {"do_rescale": False, "do_normalize": False}  # options that leave the second step out
SHAPE = {"do_resize": False, "do_center_crop": False, "do_pad": False}  # that leave the image's own size


def preparation(processor: Any, model: nn.Module) -> tuple[Callable[[Image], Tensor], Callable[[Tensor], Tensor]]:
    """An image to what travels to the device, and a batch of these to the inputs of ``model``."""
    table = _table(processor)
    if table is None:
        return lambda image: _processed(processor, image), lambda batch: batch
    model.register_buffer("pixel_numbers", table, persistent=False)  # goes to the device with the model
    return _first_step(processor), lambda batch: looked_up(model.pixel_numbers, batch)  # type: ignore[arg-type]


def _first_step(processor: Any) -> Callable[[Image], Tensor]:
    """An image to its pixels. If all that is done is one resizing, Pillow alone does it in two thirds of the time."""

    def by_processor(image: Image) -> Tensor:
        return _processed(processor, image, **NUMBERS)

    try:
        size, resample = (processor.size["width"], processor.size["height"]), processor.resample

        def by_pillow(image: Image) -> Tensor:
            return torch.from_numpy(np.asarray(image.resize(size, resample)).transpose(2, 0, 1).copy())

        same = all(torch.equal(by_pillow(probe), by_processor(probe)) for probe in _probes())
    except Exception:  # a processor that resizes otherwise
        return by_processor
    return by_pillow if same else by_processor


def looked_up(table: Tensor, batch: Tensor) -> Tensor:
    """(b, c, h, w), of which pixel p in channel i is ``table[i, p]``; in the memory format of ``batch``."""
    numbers = torch.empty_like(batch, dtype=table.dtype)
    for channel, values in enumerate(table):
        numbers[:, channel] = values[batch[:, channel].int()]
    return numbers


def _table(processor: Any) -> Tensor | None:
    """(3, 256), or none if this processor does anything else than scale and normalise pixels of 8 bits."""
    every = np.arange(256, dtype=np.uint8).reshape(16, 16, 1).repeat(3, 2)
    try:
        table = _processed(processor, _image(every), **SHAPE).reshape(3, 256)
        for probe in _probes():
            pixels = _processed(processor, probe, **NUMBERS)
            if pixels.dtype != torch.uint8 or not torch.equal(
                looked_up(table, pixels[None])[0], _processed(processor, probe)
            ):
                return None
    except Exception:  # processors have options of their own, and raise what they like at others
        return None
    return table


def _probes() -> list[Image]:
    """Noise, wide and small, tall and large."""
    rng = np.random.default_rng(0)
    return [_image(rng.integers(0, 256, shape, dtype=np.uint8)) for shape in ((37, 61, 3), (300, 200, 3))]


def _processed(processor: Any, image: Image, **options: bool) -> Tensor:
    pixels: Tensor = processor(images=[image], return_tensors="pt", **options)["pixel_values"][0]
    return pixels


def _image(pixels: np.ndarray) -> Image:
    image: Image = optional("PIL.Image", "hub").fromarray(pixels)
    return image
