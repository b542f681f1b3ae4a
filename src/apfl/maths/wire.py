"""How statistics travel, and what every message weighs: the only home of either.

A client with at least as many rows as columns sends the triangle of Phi'Phi; one with fewer sends the trapezoid of a QR
factorisation of its rows, which gives the same sums in fewer numbers. `form_for` says which.

Statistics of landmarks are integers (`apfl.maths.integers`), and weigh what `bits.Squeezed` packs them in. What
everyone is told beside integers has 16 bits a number (`to_columns`).

The sizes are those of the arrays: the tensors of a message (`apfl.federate.messages`), and the mean and the standard
deviation, which the terms carry. Headers are not counted: names, hashes and single settings such as gamma or beta.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from apfl.errors import InputError
from apfl.maths.bits import packed_bytes
from apfl.maths.landmarks import landmark_bits
from apfl.maths.leaveout import ECHO
from apfl.maths.normalise import Normaliser
from apfl.maths.ridge import Statistics, accumulate

__all__ = [
    "ECHO_BYTES",
    "Form",
    "Traffic",
    "description_bytes",
    "factor_message",
    "form_for",
    "from_columns",
    "from_message",
    "landmarks_bytes",
    "message",
    "nbytes",
    "pack",
    "publication_bytes",
    "rounded_bytes",
    "scaling_bytes",
    "spread_bytes",
    "statistics_bytes",
    "statistics_shapes",
    "table_bytes",
    "to_columns",
    "unpack",
]

Form = Literal["triangle", "factor"]
ECHO_BYTES = 2 * ECHO  # int16 counts, sent with the statistics
_MOST = 2**15 - 1  # of an integer of `to_columns`


def pack(symmetric: Tensor) -> Tensor:
    """The lower triangle, row by row: d (d + 1) / 2 numbers instead of d^2; of several matrices (..., d, d) at once.

    >>> pack(torch.tensor([[1, 2], [2, 3]])).tolist()
    [1, 2, 3]
    """
    d = symmetric.shape[-1]
    if symmetric.device.type != "cpu":  # a copy for each row would be a kernel for each row
        lower: Tensor = symmetric.flatten(-2)[..., _triangle(d, symmetric.device)]
        return lower
    packed = symmetric.new_empty(*symmetric.shape[:-2], d * (d + 1) // 2)
    for i in range(d):
        packed[..., i * (i + 1) // 2 : (i + 1) * (i + 2) // 2] = symmetric[..., i, : i + 1]
    return packed


def unpack(packed: Tensor) -> Tensor:
    """The symmetric matrix back from `pack`."""
    d = (math.isqrt(8 * len(packed) + 1) - 1) // 2
    if d * (d + 1) // 2 != len(packed):
        raise InputError(f"{len(packed)} numbers are not the triangle of any square matrix")
    if packed.device.type != "cpu":
        lower = packed.new_zeros(d * d)
        lower[_triangle(d, packed.device)] = packed
        whole: Tensor = lower.view(d, d) + lower.view(d, d).tril(-1).T
        return whole
    symmetric = packed.new_empty(d, d)
    for i in range(d):
        row = packed[i * (i + 1) // 2 : (i + 1) * (i + 2) // 2]
        symmetric[i, : i + 1] = row
        symmetric[: i + 1, i] = row
    return symmetric


def _triangle(d: int, device: torch.device) -> Tensor:
    """Where the lower triangle stands in a matrix row by row."""
    row, column = torch.tril_indices(d, d, device=device)
    places: Tensor = row * d + column
    return places


def _pack_trapezoid(upper: Tensor) -> Tensor:
    return torch.cat([row[i:] for i, row in enumerate(upper)])


def _unpack_trapezoid(packed: Tensor, n_rows: int) -> Tensor:
    width = (len(packed) + n_rows * (n_rows - 1) // 2) // max(n_rows, 1)
    if n_rows < 1 or n_rows > width or n_rows * width - n_rows * (n_rows - 1) // 2 != len(packed):
        raise InputError(f"{len(packed)} numbers are not the trapezoid of {n_rows} rows of any factor")
    upper, start = packed.new_zeros(n_rows, width), 0
    for i in range(n_rows):
        upper[i, i:] = packed[start : start + width - i]
        start += width - i
    return upper


def _squared(factor: Tensor) -> Tensor:
    """R'R, symmetric to the last bit."""
    return accumulate([(factor, factor.new_ones(len(factor), 1))]).autocorrelation


def message(stats: Statistics, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """A client's statistics as the tensors that travel; the two large ones in ``dtype``."""
    return {
        "autocorrelation": pack(stats.autocorrelation.to(dtype)),
        "crosscorrelation": stats.crosscorrelation.to(dtype),
        "class_counts": stats.class_counts,
        "n_samples": torch.tensor(stats.n_samples, dtype=torch.int64),
        "target_energy": torch.tensor(stats.target_energy, dtype=torch.float64),
    }


def factor_message(phi: Tensor, targets: Tensor, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """A client's rows as R and Q'Y of Phi = Q R: the same statistics, R'R and R'(Q'Y), in fewer numbers when n < d.

    With r = min(n, d) these are r d - r (r - 1) / 2 and r c numbers. R has no negative entry on its diagonal, which
    makes it the same for the same rows, and what Phi'Phi itself would tell: no more leaves the client.
    """
    q, factor = torch.linalg.qr(phi.to(torch.float64))  # (n, r), (r, d)
    turned = q.T @ targets.to(torch.float64)  # Q'Y (r, c)
    signs = torch.where(factor.diagonal() < 0, -1.0, 1.0).to(factor)[:, None]
    n, energy = len(phi), float(targets.to(torch.float64).square().sum())
    return {
        "factor": _pack_trapezoid((signs * factor).to(dtype)),
        "turned_targets": (signs * turned).to(dtype),
        "class_counts": targets.to(torch.float64).sum(0),
        "n_samples": torch.tensor(n, dtype=torch.int64),
        "target_energy": torch.tensor(energy, dtype=torch.float64),
    }


def from_message(received: Mapping[str, Tensor], of: type[Statistics] = Statistics) -> Statistics:
    """The statistics back from `message` or `factor_message`, in float64; ``of`` classes, or of numbers as targets."""
    try:
        if "factor" in received:
            turned = received["turned_targets"].to(torch.float64)
            factor = _unpack_trapezoid(received["factor"].to(torch.float64), len(turned))
            autocorrelation, crosscorrelation = _squared(factor), factor.T @ turned
        else:
            autocorrelation = unpack(received["autocorrelation"].to(torch.float64))
            crosscorrelation = received["crosscorrelation"].to(torch.float64)
        return of(
            autocorrelation,
            crosscorrelation,
            received["class_counts"].to(torch.float64),
            int(received["n_samples"]),
            float(received["target_energy"]),
        )
    except KeyError as error:
        raise InputError(f"a message of statistics lacks {error}; it has: {', '.join(sorted(received))}") from error


def to_columns(values: Tensor) -> tuple[Tensor, Tensor]:
    """Integers of 16 bits (d, c), and the scale of each column in single precision (c,).

    No entry is wrong by more than half the scale, s / 2, which is 1 / 65534 of the largest in its column. So no product
    phi'G of a row at most 1 long is wrong by more than sqrt(d) s / 2.

    >>> integers, scale = to_columns(torch.tensor([[1.0, 0.0], [-0.5, 0.0]], dtype=torch.float64))
    >>> integers.tolist(), scale.tolist()[1], from_columns(integers, scale)[1, 0].item()
    ([[32767, 0], [-16384, 0]], 1.0, -0.5000152...)
    """
    scale = (values.abs().amax(0) / _MOST).float()
    scale = torch.where(scale == 0, 1, scale)
    return (values / scale.double()).round().clamp(-_MOST, _MOST).to(torch.int16), scale


def from_columns(integers: Tensor, scale: Tensor) -> Tensor:
    """What `to_columns` says, float64."""
    return integers.double() * scale.double()


def nbytes(tensors: Mapping[str, Tensor]) -> int:
    """Payload of some tensors in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def form_for(n_samples: int, width: int) -> Form:
    """How the statistics of so many rows travel: as the triangle, or with fewer rows than columns as the factor."""
    return "factor" if n_samples < width else "triangle"


def statistics_shapes(form: Form, n_samples: int, width: int, n_classes: int) -> dict[str, tuple[int, ...]]:
    """Shapes of the two large tensors of `message` or `factor_message`. With n >= d both forms have the same size.

    >>> statistics_shapes("factor", 2, 5, 3)
    {'factor': (9,), 'turned_targets': (2, 3)}
    """
    if form == "triangle":
        return {"autocorrelation": (width * (width + 1) // 2,), "crosscorrelation": (width, n_classes)}
    r = min(n_samples, width)
    return {"factor": (r * width - r * (r - 1) // 2,), "turned_targets": (r, n_classes)}


def statistics_bytes(n_samples: int, width: int, n_classes: int, dtype: torch.dtype = torch.float64) -> int:
    """What the statistics of so many rows weigh in the form in which they travel; class counts, n and energy too.

    >>> statistics_bytes(2, 5, 3), statistics_bytes(50, 5, 3)
    (160, 280)
    """
    shapes = statistics_shapes(form_for(n_samples, width), n_samples, width, n_classes)
    return sum(map(math.prod, shapes.values())) * dtype.itemsize + 8 * n_classes + 16


def description_bytes(n_features: int, *, moments: bool) -> int:
    """What a client says first: its n, and if the normalisation needs them the moments of its features.

    These are the sums and squares of each column, and three numbers about the sizes of rows.
    """
    return 8 + (16 * n_features + 24 if moments else 0)


def scaling_bytes(normalise: Normaliser) -> int:
    """What clients are told of the moments: the mean and the standard deviation, if the normalisation has them."""
    return sum(8 * len(vector) for vector in (normalise.mean, normalise.std) if vector is not None)


def publication_bytes(
    width: int, n_classes: int, *, sketch: int | None = None, dtype: torch.dtype = torch.float64
) -> int:
    """The primary, everyone's class counts, and the leverage: a sketch of so many columns, or with 0 the factor.

    In int16 each column of the primary and of the sketch has a scale (`to_columns`); the factor has double precision.
    """
    columns, factor = n_classes + (sketch or 0), width * (width + 1) // 2 if sketch == 0 else 0
    scales = 4 * columns if dtype == torch.int16 else 0
    whole = torch.float64 if dtype == torch.int16 else dtype
    return width * columns * dtype.itemsize + scales + factor * whole.itemsize + 8 * n_classes


def spread_bytes(n_in: int, *, full: bool) -> int:
    """What a client sends for the landmarks in float64: the sums of its rows, and of their products or squares."""
    return 8 * (n_in + (n_in * (n_in + 1) // 2 if full else n_in))


def landmarks_bytes(d: int, n_in: int, *, mean_squares: bool) -> int:
    """The landmarks, the scale of each column, and the unit of the columns of phi if integers need it.

    >>> landmarks_bytes(6144, 1280, mean_squares=True)
    3961856
    """
    return packed_bytes(d * n_in, landmark_bits(n_in)) + 4 * n_in + (4 * d if mean_squares else 0)


def rounded_bytes(width: int, n_classes: int, bits: int) -> int:
    """The most that statistics weigh as integers, in the layout of `apfl.maths.integers`, without the echo.

    So many bits for each entry of T'T below its diagonal, four more for one of T'Y, 32 for those on the diagonal, for
    the rows of each class, for all rows and for copies. Squeezed they weigh about half of it.

    >>> rounded_bytes(4, 3, 16)
    78
    """
    below, cross = math.ceil(bits * (width * (width - 1) // 2) / 8), math.ceil((bits + 4) * width * n_classes / 8)
    return below + cross + 4 * (width + n_classes + 2)


def table_bytes(shape: Sequence[int]) -> int:
    """A table of left-out hits, for each setting tried."""
    return 8 * math.prod(shape)


@dataclass(frozen=True)
class Traffic:
    """What travels, by what it is: bytes of each client up, bytes to each client down, and exchanges.

    >>> both = Traffic({"statistics": [100, 300]}) + Traffic({"moments": [10, 10]}, {"landmarks": 50}, 1)
    >>> both.total_up, both.total_down(2), both.rounds, both.account["most"]
    (420, 100, 1, 360)
    """

    up: Mapping[str, Sequence[int]] = field(default_factory=dict)
    down: Mapping[str, int] = field(default_factory=dict)
    rounds: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic({**self.up, **other.up}, {**self.down, **other.down}, self.rounds + other.rounds)

    @property
    def total_up(self) -> int:
        """Of all clients."""
        return sum(map(sum, self.up.values()))

    def total_down(self, n_clients: int) -> int:
        """To all clients."""
        return n_clients * sum(self.down.values())

    @property
    def account(self) -> dict[str, Any]:
        """For the record: a client's bytes by what they are, on average, and all of the client that has most."""
        each = [sum(own) for own in zip(*self.up.values(), strict=True)]
        up = {name: round(sum(own) / len(own)) for name, own in self.up.items()}
        return {"up": up, "down": dict(self.down), "most": max(each, default=0) + sum(self.down.values())}
