"""The centred landmark map between machines: landmarks from no data, and the mean and length that rows are told about.

The server draws all of it once and sends it, so that every site has the same map to the last bit. Whatever it sends, a
site brings its rows back to length 1 before it sums them up: the promise does not hang on the server's map.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from apfl.errors import InputError
from apfl.federate.wire import Expected
from apfl.maths.centred import CentredMap, centred
from apfl.maths.landmarks import SYNTHETIC, LandmarkMap, Spread, draw_points, landmark_map

__all__ = ["centred_tensors", "draw_centred", "expected_centre", "open_centred"]


def draw_centred(d: int, seed: int, shared: Spread) -> CentredMap:
    """The map of a federation under noise, as `apfl` draws it in one process."""
    drawn = landmark_map(draw_points(d, 2 * seed, shared))
    return centred(drawn, draw_points(SYNTHETIC, 2 * seed + 1, shared))


def centred_tensors(mapped: CentredMap) -> dict[str, Tensor]:
    """The centre as it travels beside the landmarks."""
    return {"centre": mapped.mean, "stretch": torch.tensor(mapped.scale, dtype=torch.float64)}


def expected_centre(width: int) -> Expected:
    """What a message with landmarks under noise holds of it."""
    return {"centre": (("F64",), (width,)), "stretch": (("F64",), ())}


def open_centred(landmarks: LandmarkMap, tensors: Mapping[str, Tensor]) -> CentredMap:
    """The map about its centre, checked."""
    centre, stretch = tensors["centre"], float(tensors["stretch"])
    if not bool(torch.isfinite(centre).all()) or not 0 < stretch < float("inf"):
        raise InputError("landmarks whose centre is not finite, or whose stretch is not positive; get them again")
    return CentredMap(landmarks, centre, stretch)
