"""Row recovery by whoever holds the transcript, sums and publications of a whole federation, with a late cohort.

Digits of two classes, three sites of 16 rows and three more that come later. Without masks the attack of
examples/attacks.py recovers rows from a single upload, and from the difference of two sums if only sums are kept. With
masks it gets every message, every sum before and after the join, and their difference, and recovers none.
"""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from apfl.data.federation import Shard
from apfl.federate import Coordinator, Site, Terms
from apfl.federate.inprocess import simulate
from apfl.federate.masked.inprocess import MaskedFederation
from apfl.federate.masked.purposes import Purpose, round_of
from apfl.federate.messages import open_publication
from apfl.federate.secure.digits import Digits
from apfl.federate.secure.masks import add_packed, packed_bytes, word
from apfl.methods.apfl import APFL

pytest.importorskip("cryptography", reason="needs the flower extra: pip install 'apfl[flower]'")
example = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "attacks.py"))

N, K, CLASSES = 16, 3, ("0", "1")
# As many bits as there are: rounding is no protection here.
METHOD = APFL(
    map="landmarks", bits=32, normalise="row", d_primary=100, gamma=1e-3, beta=1.0, balance=0.5,
    tau=0.0, weight=1.0, sketch=16,
)  # fmt: skip


@pytest.fixture(scope="module")
def everyone() -> list[Shard]:
    pixels, labels = load_digits(n_class=2, return_X_y=True)
    order = np.random.default_rng(0).permutation(len(pixels))[: 2 * K * N].reshape(2 * K, N)
    return [Shard(torch.from_numpy(pixels[own] / 16), torch.from_numpy(labels[own])) for own in order]


def sites(folder: Path, shards: list[Shard], start: int = 0) -> list[Site]:
    return [Site(folder, f"site-{k}", rows, CLASSES, rounding_seed=k) for k, rows in enumerate(shards, start)]


def terms(**others) -> Terms:
    return Terms("f", method=METHOD, **({"class_names": CLASSES, "n_features": 64, "max_rows": N} | others))


def attack(feature_map, matrix: torch.Tensor, n: int, rows: list[Shard], batches: int = 3) -> int:
    """How many of these rows come back from Phi'Phi of n rows, as directions."""
    found = example["LandmarkAttack"](feature_map, matrix, min(n, len(matrix))).run(batches)
    truth = torch.nn.functional.normalize(torch.cat([each.features for each in rows]))
    return int(example["recovered"](found, truth))


def test_the_slopes_of_the_landmark_map_are_those_of_differences():
    from apfl.maths.landmarks import draw_points, landmark_map, no_spread

    feature_map = landmark_map(draw_points(20, 0, no_spread(6)))
    z, step = torch.rand(2, 6, dtype=torch.float64), 1e-6
    slopes = example["LandmarkAttack"](feature_map, torch.eye(20), 1).jacobian(z)
    moved = [(feature_map(z + step * e) - feature_map(z - step * e)) / (2 * step) for e in torch.eye(6).double()]
    torch.testing.assert_close(slopes, torch.stack(moved, 2), rtol=1e-5, atol=1e-6)  # of central differences


def test_without_masks_rows_come_back_from_an_upload_and_from_the_difference_of_two_sums(tmp_path, everyone):
    own, plain = sites(tmp_path / "sites", everyone[:K]), terms(keep_contributions=False)
    simulate(own, plain, tmp_path / "server")
    (late,) = sites(tmp_path / "sites", everyone[K : K + 1], K)
    with Coordinator(tmp_path / "server") as server:
        before, settled, agreement = server.pool.running().vector.copy(), server.terms, server.settle()
        landmarks = server.pool.landmarks
        late.describe(server.invitation())
        late.keep_landmarks(agreement, server.landmarks())
        upload = late.statistics(agreement)
        assert server.accept(upload, late.name).ok
        difference = server.pool.running().vector - before
    told = landmarks.encoding(settled).decode(torch.from_numpy(difference))
    assert told.n_samples == N
    assert attack(landmarks.feature_map, told.autocorrelation, N, everyone[K : K + 1], batches=20) >= N - 2
    assert attack(landmarks.feature_map, told.autocorrelation, N, everyone[:K], batches=1) == 0


def test_with_masks_nothing_of_the_whole_transcript_gives_a_row_away_before_and_after_a_join(tmp_path, everyone):
    """At the widest map that is admitted: a quarter of a cohort's rows."""
    heard: list[tuple[str, str, str, bytes]] = []
    agreed = terms(masked=True)
    agreed = replace(agreed, method=replace(agreed.method, d_primary="auto", d_refinement="auto"))
    sums, published, digits = [], [], []
    with Coordinator(tmp_path / "server", agreed) as server:
        for start in (0, K):
            cohort = MaskedFederation(
                server, sites(tmp_path / "sites", everyone[start : start + K], start),
                overhear=lambda *each: heard.append(each),
            )  # fmt: skip
            cohort.sum_up()
            server.publish()
            cohort.refine()
            sums.append(server.pool.running().vector.copy())
            published.append(open_publication(server.current().data, server.terms))
            shape = Purpose("statistics"), 1, cohort.cohort.roster, server.terms, cohort.cohort.counts
            digits.append(round_of(*shape, server.pool.landmarks)[1])
        settled, landmarks = server.terms, server.pool.landmarks
    assert settled.width == K * N // 4
    encoding = landmarks.encoding(settled)
    answers = [answer for what, phase, _, answer in heard if (what, phase) == ("statistics", "mask")]
    assert len(answers) == 2 * K
    payloads = [_as_read(answer, digits[k // K]) for k, answer in enumerate(answers)]
    matrices = [encoding.decode(torch.from_numpy(vector)).autocorrelation for vector in payloads]
    tried = [(matrix, N) for matrix in matrices]
    tried += [(encoding.decode(torch.from_numpy(vector)).autocorrelation, n) for vector, n in zip(
        (sums[0], sums[1], sums[1] - sums[0]), (K * N, 2 * K * N, K * N), strict=True
    )]  # fmt: skip
    # What a publication tells of the sum: (A + gamma I) G = B, the sums of each class.
    class_sums = [(told.weights.double(), told.weights.double() @ told.weights.double().T) for told in published]
    tried += [(outer, len(weights)) for weights, outer in class_sums]
    for matrix, n in tried:
        assert attack(landmarks.feature_map, (matrix + matrix.T) / 2, n, everyone, batches=1) == 0


def _as_read(answer: bytes, digits: Digits) -> np.ndarray:
    """A masked payload read as if it had no mask."""
    numbers = np.zeros(digits.length, word(digits.sum_bits))
    add_packed(numbers, answer[-packed_bytes(digits.length, digits.sum_bits) :], digits.sum_bits)
    total, vector, start = numbers.astype(np.int64), [], 0
    for part in digits.layout.parts:
        own = np.zeros(part.size, np.int64)
        for shift in digits._shifts(part):
            own += total[start : start + part.size] << shift
            start += part.size
        signed = own - (own >> (digits.sum_bits - 1) << digits.sum_bits)
        vector.append(signed if part.name in digits.whole else own + part.low)
    told = np.concatenate(vector)
    known = {"class_counts": [N // 2, N // 2], "n_samples": N, "n_copies": 0, "echo": 0}  # or no rows have such sums
    for name, value in known.items():
        told[digits.layout.places[name]] = value
    return told
