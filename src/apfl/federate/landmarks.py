"""Landmarks between machines: the moments that they are drawn from, and the message that takes them to every site.

The server draws them once, from the sum of the clients' moments (`apfl.maths.landmarks`), and sends them packed, with
D, the unit of each column of phi (`apfl.maths.integers`). The settled terms hold the hash of that message.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apfl.errors import InputError
from apfl.federate.ledger import Ledger
from apfl.federate.names import check_name
from apfl.federate.plausible import positive, smallest_eigenvalue
from apfl.federate.private.agreement import encoding_of
from apfl.federate.private.landmarks import centred_tensors, draw_centred, expected_centre, open_centred
from apfl.federate.terms import Terms
from apfl.federate.wire import Expected, count, seal, sha256, text, unseal
from apfl.maths.bits import Layout, Squeezed, packed_bytes
from apfl.maths.centred import CentredMap
from apfl.maths.dither import Uniform
from apfl.maths.integers import Encoding, Rounding, spectral_bound
from apfl.maths.landmarks import LandmarkMap, Spread, landmark_bits, no_spread
from apfl.maths.noise import IntegerRows
from apfl.maths.spread_encoding import SpreadEncoding
from apfl.methods._streams import Map, draw_landmarks

__all__ = [
    "Landmarks",
    "SentSpread",
    "agreed_maps",
    "draw",
    "load_landmarks",
    "open_landmarks",
    "open_spread",
    "packed",
    "packing",
    "read_landmarks",
    "seal_landmarks",
    "seal_spread",
    "settled_with",
    "spread_encoding",
    "unpacked",
]

KIND = "landmarks"
SPREAD = "spread"
VECTOR = "integers"  # the one tensor of a message that is a vector of integers


@dataclass(frozen=True, eq=False)
class Landmarks:
    """The map of a federation, and the unit of each column of what travels."""

    feature_map: LandmarkMap
    mean_squares: Tensor  # D (d,), float32; none with numbers as targets, whose sums are no integers
    centred: CentredMap | None = None  # under epsilon: the map about its centre, which both streams use

    def encoding(self, terms: Terms) -> Encoding | IntegerRows:
        """How statistics under these terms are integers."""
        if terms.private:
            return encoding_of(terms)
        assert terms.most_rows is not None
        rounding = Rounding.for_rows(terms.bits, terms.most_rows)
        return Encoding(rounding, self.mean_squares, terms.n_classes, self.feature_map.basis)


def agreed_maps(terms: Terms, like: Tensor, landmarks: Landmarks | None) -> tuple[Map | CentredMap, Map | CentredMap]:
    """The primary and the refinement map."""
    if landmarks is None:
        return terms.maps(like)
    if landmarks.centred is not None:
        return landmarks.centred, landmarks.centred
    return landmarks.feature_map, landmarks.feature_map


def packed(how: Squeezed, vector: Tensor) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """A vector of integers as a part of a message's header, and as its tensor."""
    told = {"bits": list(how.bits), "escaped": list(how.escaped)}
    return told, {VECTOR: torch.from_numpy(how.pack(vector.cpu().numpy()).copy())}


def packing(layout: Layout, header: Mapping[str, Any]) -> Squeezed:
    """How the vector of a message with this header is packed: never in more bytes than its layout takes."""
    told = [header.get(name) for name in ("bits", "escaped")]
    for each in told:
        if not isinstance(each, list) or len(each) != len(layout.parts) or not all(type(n) is int for n in each):
            raise InputError(f"the header must list {len(layout.parts)} widths and counts; {str(each)[:40]} given")
    how = Squeezed(layout, *map(tuple, told))  # type: ignore[arg-type]  # lists of integers
    if how.n_bytes > layout.n_bytes:
        raise InputError(f"integers in {how.n_bytes} bytes; without squeezing they take {layout.n_bytes}")
    return how


def unpacked(how: Squeezed, tensors: Mapping[str, Tensor]) -> np.ndarray:
    """The vector back; every integer is within its range."""
    return how.unpack(tensors[VECTOR].numpy())


# ------------------------------------------------------------------------------------------------------- moments


@dataclass(frozen=True, eq=False)
class SentSpread:
    """A client's moments as they arrived."""

    client: str
    integers: np.ndarray  # int64
    n_samples: int


def spread_encoding(outline: Terms) -> SpreadEncoding:
    """How moments under this outline are integers."""
    assert outline.most_rows is not None
    return SpreadEncoding(outline.most_rows, outline.n_in, outline.spread == "full")


def seal_spread(own: Spread, outline: Terms, client: str, draw: Uniform) -> bytes:
    """The moments of a client's normalised rows, as integers of one agreed step."""
    encoding = spread_encoding(outline)
    vector, saturated = encoding.encode(own, draw)
    told, tensors = packed(encoding.packing(vector), vector)
    header = {
        "federation": outline.federation, "terms": outline.digest, "client": check_name("client", client),
        "n": own.n_samples, "saturated": saturated, **told,
    }  # fmt: skip
    return seal(SPREAD, header, tensors)


def open_spread(data: bytes, outline: Terms) -> SentSpread:
    """Moments under this outline that n rows of length sqrt(l) can have."""
    layout = spread_encoding(outline).layout

    def expected(header: dict[str, Any]) -> Expected:
        if text(header, "federation") != outline.federation or text(header, "terms") != outline.digest:
            raise InputError("moments that were made under other terms; join again")
        return {VECTOR: (("U8",), (packing(layout, header).n_bytes,))}

    header, tensors = unseal(SPREAD, data, expected)
    integers = unpacked(packing(layout, header), tensors)
    n = int(integers[layout.places["n_samples"]][0])
    if n > (outline.most_rows or 0):
        raise InputError(f"moments of {n} rows; the outline was made for at most {outline.most_rows}")
    if n < 1 or n != count(header, "n"):
        raise InputError(f"n contradicts itself: {count(header, 'n')} in the header, {n} in the message")
    _check_spread(spread_encoding(outline), integers)
    return SentSpread(check_name("client", text(header, "client")), integers, n)


def _check_spread(encoding: SpreadEncoding, integers: np.ndarray) -> None:
    """Refuse sums that no rows have: of squares below zero or above n l, or a covariance that is indefinite."""
    told, step, width = encoding.decode(torch.from_numpy(integers)), encoding.rounding.step, encoding.n_in
    n, squares = told.n_samples, told.products.diagonal() if encoding.full else told.products
    most = n * width * (1 + 1e-3) + width * step  # rows are scaled in single precision, and every entry is rounded
    if float(squares.min()) < 0 or float(squares.sum()) > most:
        raise InputError(
            f"moments that {n} rows do not have: squares from {float(squares.min()):.4g} on that sum to "
            f"{float(squares.sum()):.4g}; allowed are 0 or more, and at most {most:.4g} together"
        )
    sums = told.sums  # each is wrong by less than a step, so that sums sums' is wrong by 2 |sums| |error| + |error|^2
    error, length = math.sqrt(width) * step, float(sums.norm())
    allowed = n * (spectral_bound(encoding.rounding, 1, width) + step) + (2 * length + error) * error + 1e-9 * n * most
    if encoding.full:
        covariance = n * told.products - torch.outer(sums, sums)
        if positive(covariance, allowed):
            return
        lowest = smallest_eigenvalue(covariance) - allowed  # which was added
    else:
        lowest = float((n * squares - sums.square()).min())
        if lowest >= -allowed:
            return
    raise InputError(
        f"moments that no rows have: a variance of {lowest / n**2:.4g}; rounding explains {-allowed / n**2:.4g}"
    )


# ----------------------------------------------------------------------------------------------------- landmarks


def draw(outline: Terms, spreads: Iterable[np.ndarray], public: Spread | None = None) -> tuple[Terms, bytes]:
    """The settled terms and the message with the landmarks, from the sum of the clients' integers or public moments."""
    assert outline.outlined
    shared = no_spread(outline.n_in) if public is None else public
    if outline.spread is not None:
        encoding = spread_encoding(outline)
        summed = np.zeros(encoding.layout.size, np.int64)
        for integers in spreads:
            summed += integers
        shared = encoding.decode(torch.from_numpy(summed))
    d, seed = int(outline.method.d_primary), outline.seed
    if outline.private:
        about = draw_centred(d, seed, shared)
        drawn = Landmarks(about.landmarks, torch.ones(about.width), about)
    else:
        drawn = Landmarks(*draw_landmarks(d, seed, shared, torch.zeros(1, 1)))
    return settled_with(outline, drawn)


def settled_with(outline: Terms, drawn: Landmarks) -> tuple[Terms, bytes]:
    """The terms that name these landmarks, and the message that has them."""
    data, fingerprint = seal_landmarks(outline.federation, drawn), drawn.feature_map.fingerprint
    settled = replace(
        outline, fingerprints=(fingerprint, fingerprint), n_landmarks=drawn.feature_map.width,
        landmarks_sha256=sha256(data),
    )  # fmt: skip
    return settled, data


def seal_landmarks(federation: str, landmarks: Landmarks) -> bytes:
    """The landmarks as every site gets them."""
    feature_map = landmarks.feature_map
    tensors = {"points": feature_map.packed(), "scale": feature_map.scale}
    beside = landmarks.centred
    if beside is not None:
        tensors |= centred_tensors(beside)
    elif len(landmarks.mean_squares):
        tensors["mean_squares"] = landmarks.mean_squares
    return seal(KIND, {"federation": federation}, tensors)


def open_landmarks(data: bytes, terms: Terms) -> Landmarks:
    """The landmarks that these terms name."""
    if sha256(data) != terms.landmarks_sha256:
        raise InputError(
            f"other landmarks than agreed (hash {sha256(data)[:12]}, agreed {str(terms.landmarks_sha256)[:12]}); get "
            "them again from the server"
        )
    d, n_in = terms.n_landmarks or terms.width, terms.n_in
    n_bytes = packed_bytes(d * n_in, landmark_bits(n_in))
    beside: Expected = expected_centre(d) if terms.private else {"mean_squares": (("F32",), (d,))}
    if terms.numeric:
        beside = {}
    shapes: Expected = {"points": (("U8",), (n_bytes,)), "scale": (("F32",), (n_in,)), **beside}
    _, tensors = unseal(KIND, data, lambda header: shapes)
    for name in ("scale",) if terms.private or terms.numeric else ("scale", "mean_squares"):
        if not bool(((tensors[name] > 0) & torch.isfinite(tensors[name])).all()):
            raise InputError(f"landmarks whose {name} is not positive; get them again from the server")
    feature_map = LandmarkMap.unpacked(tensors["points"], tensors["scale"], d)
    if terms.private:
        found = Landmarks(feature_map, torch.ones(d), open_centred(feature_map, tensors))
    else:
        found = Landmarks(feature_map, torch.zeros(0) if terms.numeric else tensors["mean_squares"])
    if found.feature_map.fingerprint != (terms.fingerprints or ("",))[0]:
        raise InputError("landmarks that are not those of the terms; get them again from the server")
    return found


def load_landmarks(ledger: Ledger, terms: Terms) -> Landmarks | None:
    """Those of a server's folder; none under a random map."""
    return open_landmarks(read_landmarks(ledger, terms), terms) if terms.landmarked else None


def read_landmarks(ledger: Ledger, terms: Terms) -> bytes:
    """The message with the landmarks, from a server's folder."""
    return ledger.blobs.read(ledger.get("landmarks") or "landmarks.safetensors", terms.landmarks_sha256 or "")
