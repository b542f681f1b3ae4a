"""What must never reach a sum of integers: every kind of malformed contribution and moments, and changed bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apfl.errors import InputError
from apfl.federate import Coordinator, Site, Terms
from apfl.federate.contribution import check, decode, largest_answer
from apfl.federate.landmarks import Landmarks, load_landmarks, open_landmarks, open_spread, packed, spread_encoding
from apfl.federate.plausible import scatter_error
from apfl.maths.bits import Layout, squeeze
from apfl.maths.dither import uniform
from apfl.maths.integers import Encoding, spectral_bound
from apfl.maths.leaveout import ECHO
from apfl.maths.ridge import Statistics, one_hot, statistics
from tests.federate.federation_toys import LANDMARKS, NAMES, contribute, draw_shard, make_sites
from tests.federate.test_deploy_refusals import Message, header

Change = Callable[[np.ndarray, Encoding], None]


@cache
def running() -> tuple[Terms, Terms, Landmarks, list[Site], bytes]:
    """A federation under way: terms, outline, landmarks, sites, agreement."""
    folder = Path(mkdtemp())
    sites = make_sites(folder)
    with Coordinator(folder / "server", Terms("f", method=LANDMARKS, class_names=NAMES)) as server:
        agreement = contribute(server, sites)
        landmarks = load_landmarks(server.ledger, server.terms)
        assert landmarks is not None
        return server.terms, Terms.from_json(server.outline()), landmarks, sites, agreement


def resealed(change: Change, site: int = 1) -> bytes:
    """A site's contribution with other integers."""
    terms, _, landmarks, sites, agreement = running()
    message, encoding = Message.of(sites[site].statistics(agreement)), landmarks.encoding(terms)
    vector = decode(sites[site].statistics(agreement), terms).integers.copy()
    change(vector, encoding)
    fill(message, encoding.layout, vector)
    message.header |= {"n": int(vector[encoding.layout.places["n_samples"]][0])}
    return message.sealed()


def fill(message: Message, layout: Layout, vector: np.ndarray) -> None:
    """Other integers for a message."""
    integers = torch.from_numpy(vector)
    told, message.tensors = packed(squeeze(layout, integers), integers)
    message.header |= told


def part(name: str, change: Callable[[np.ndarray], object]) -> Change:
    def changed(vector: np.ndarray, encoding: Encoding) -> None:
        own = vector[encoding.layout.places[name]]
        own[:] = change(own)

    return changed


def first(value: int) -> Callable[[np.ndarray], object]:
    return lambda own: np.where(np.arange(len(own)) == 0, value, own)


def dip(times: float, *, within: bool = False) -> Change:
    """Push the smallest eigenvalue of the scaled matrix to so many times what rounding explains, below zero.

    ``within``: that of the scatter within classes.
    """

    def changed(vector: np.ndarray, encoding: Encoding) -> None:
        stats, places = encoding.told(torch.from_numpy(vector)), encoding.layout.places
        scale = encoding.columns.double().sqrt()
        scaled = stats.autocorrelation / (scale[:, None] * scale)
        values, vectors = torch.linalg.eigh(scatter(stats) / (scale[:, None] * scale) if within else scaled)
        down = values[0] + times * spectral_bound(encoding.rounding, 1, len(scale))
        lowered = scaled - down * torch.outer(vectors[:, 0], vectors[:, 0])
        below = torch.tril_indices(len(scale), len(scale), -1)
        vector[places["below"]] = (lowered[below[0], below[1]] / encoding.rounding.step).round().long().numpy()
        vector[places["diagonal"]] = (lowered.diagonal() / encoding.rounding.diagonal.step).round().long().numpy()

    return changed


def fewer_rows(vector: np.ndarray, encoding: Encoding) -> None:
    """As if 50 of the 70 rows were behind the sums."""
    places = encoding.layout.places
    vector[places["n_samples"]] = 50
    vector[places["class_counts"]] = [20, 20, 10]
    vector[places["echo"]] = np.arange(ECHO) < 50


def longer_class(vector: np.ndarray, encoding: Encoding) -> None:
    own = vector[encoding.layout.places["cross"]].reshape(-1, 3)
    own[:, 0] *= 2


CASES: dict[str, tuple[Change, str]] = {
    "no rows": (lambda v, e: v.__setitem__(slice(None), 0), "copies among 0 rows|no rows"),
    "counts": (part("class_counts", lambda own: own + 1), "n contradicts the class counts"),
    "withheld class": (part("class_counts", lambda own: np.array([1, own[0] + own[1] - 1, own[2]])), "withheld"),
    "negative diagonal": (part("diagonal", first(-1)), "negative sum of squares"),
    "a longer row": (part("diagonal", lambda own: own * 2), "n contradicts the matrix: trace"),
    "fewer rows": (fewer_rows, "n contradicts the matrix|too long"),
    "a longer class": (longer_class, "class sums are too long"),
    "indefinite": (dip(1.2), "indefinite beyond rounding"),
    "indefinite within classes": (dip(1.5, within=True), "n contradicts the matrix: the class sums are too long"),
    "noise": (part("below", lambda own: np.random.default_rng(0).integers(-9999, 9999, len(own))), "indefinite|trace"),
    "copies": (part("n_copies", lambda own: own + 70), "copies among"),
    "no echo": (part("echo", lambda own: own * 0), "echo that 70 rows do not have"),
    "too long an echo": (part("echo", lambda own: own + 1), "echo that 70 rows do not have"),
    "too many rows": (part("n_samples", lambda own: own + 1), "n contradicts the class counts"),
}  # fmt: skip


def judged(data: bytes) -> None:
    terms, _, landmarks, *_ = running()
    check(decode(data, terms), terms, landmarks)


@pytest.mark.parametrize("case", CASES)
def test_integers_that_no_rows_have_are_refused(case):
    change, reason = CASES[case]
    with pytest.raises(InputError, match=reason):
        judged(resealed(change))


def test_what_rounding_explains_is_accepted():
    judged(resealed(lambda vector, encoding: None))
    judged(resealed(dip(0.5, within=True)))


def test_sums_of_a_class_without_rows_are_refused():
    """Zero is rounded to zero, so there is nothing to allow for."""
    terms, _, landmarks, sites, agreement = running()
    encoding = landmarks.encoding(terms)
    phi = landmarks.feature_map(terms.normaliser()(draw_shard(30, 3).features))
    own = replace(statistics(phi, one_hot(torch.arange(30) % 2, 3)), echo=(torch.arange(ECHO) < 30).long())
    vector = encoding.encode(own, lambda rows, columns: torch.full((rows, columns), 0.5))[0].numpy()
    message = Message.of(sites[1].statistics(agreement))
    message.header |= {"n": 30}
    for extra, refused in ((0, False), (1, True)):
        vector[encoding.layout.places["cross"]][2] = extra  # the first column's sum over the third class
        fill(message, encoding.layout, vector)
        if refused:
            with pytest.raises(InputError, match="a class without rows"):
                judged(message.sealed())
        else:
            judged(message.sealed())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (header("n", 69), "n contradicts itself: 69 in the header"),
        (header("form", "triangle"), "these terms need integers"),
        (header("map", "0" * 64), "another feature map"),
        (header("terms", "0" * 64), "other terms"),
        (header("saturated", -1), "saturated"),
        (lambda m: m.tensors.update(integers=m.tensors["integers"][:-1]), "must be U8"),
        (lambda m: m.tensors.update(more=m.tensors["integers"].clone()), "must hold integers"),
        (lambda m: m.tensors.update(integers=m.tensors["integers"] & 0), "below: 780 entries should follow"),
        (lambda m: m.header.update(escaped=[0] * 7, bits=[16, 32, 20, 32, 32, 32, 16]), "must be U8"),
        (lambda m: m.header.update(escaped=[0] * 6 + [ECHO], bits=[16, 32, 20, 32, 32, 32, 15]), "without squeezing"),
        (lambda m: m.header.update(escaped=[0] * 7, bits=[16, 32, 20, 32, 32, 32, 17]), "echo: 17 bits"),
        (header("bits", [0, 32, 20, 32, 32, 32, 16]), "below: 0 bits"),
        (header("bits", [True, 32, 20, 32, 32, 32, 16]), "must list 7 widths"),
        (header("bits", [2**70, 32, 20, 32, 32, 32, 16]), "below: "),
        (header("bits", 16), "must list 7 widths"),
        (header("escaped", [0] * 6), "must list 7 widths"),
        (header("escaped", ["0"] * 7), "must list 7 widths"),
    ],
)
def test_other_messages_are_refused(change, reason):
    _, _, _, sites, agreement = running()
    message = Message.of(sites[1].statistics(agreement))
    change(message)
    with pytest.raises(InputError, match=reason):
        judged(message.sealed())


def test_answers_are_no_larger_than_is_allowed_for():
    terms, outline, _, sites, agreement = running()
    assert len(sites[0].statistics(agreement)) <= largest_answer(terms)
    assert len(sites[0].spread(outline.to_json().encode())) <= largest_answer(outline)
    large = replace(outline, n_features=5000, spread="full")
    assert largest_answer(large) > spread_encoding(large).layout.n_bytes > 37e6


# ------------------------------------------------------------------------------------------------------- moments


def spread_with(change: Callable[[np.ndarray, dict[str, slice]], None], site: int = 1) -> bytes:
    _, outline, _, sites, _ = running()
    data = sites[site].spread(outline.to_json().encode())
    layout, vector = spread_encoding(outline).layout, open_spread(data, outline).integers.copy()
    change(vector, dict(layout.places))
    message = Message.of(data)
    fill(message, layout, vector)
    message.header["n"] = int(vector[-1])
    return message.sealed()


def at(name: str, value: Callable[[np.ndarray], object]) -> Callable[[np.ndarray, dict[str, slice]], None]:
    return lambda vector, places: vector.__setitem__(places[name], value(vector[places[name]]))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (at("products", lambda own: -own), "squares from -"),
        (at("products", lambda own: own * 3 // 2), "allowed are 0 or more, and at most"),
        (at("products", lambda own: own // 2), "a variance of -"),
        (at("sums", lambda own: own * 3), "a variance of -"),
        (at("products", lambda own: np.where(np.arange(len(own)) == 1, own.max(), own)), "a variance of -"),
        (at("n_samples", lambda own: own * 2), "at most 70"),
        (at("n_samples", lambda own: own * 0), "n contradicts itself: 0"),
    ],
)
def test_moments_that_no_rows_have_are_refused(change, reason):
    outline = running()[1]
    open_spread(spread_with(lambda vector, places: None), outline)
    with pytest.raises(InputError, match=reason):
        open_spread(spread_with(change), outline)


def test_moments_of_squares_alone_are_checked_too(tmp_path):
    """With fewer than four rows for each of the nine columns."""
    sites = make_sites(tmp_path, (10, 12))
    with Coordinator(tmp_path / "server", Terms("f", method=LANDMARKS)) as server:
        for site in sites:
            server.describe(site.describe(server.invitation()), site.name)
        outline = Terms.from_json(server.outline())
        assert outline.spread == "diagonal"
        data = sites[0].spread(server.outline())
        vector = open_spread(data, outline).integers.copy()
        vector[: outline.n_in] *= 3
        message = Message.of(data)
        fill(message, spread_encoding(outline).layout, vector)
        assert "a variance of -" in server.spread(message.sealed(), "site-0").reason
        assert "sent by 'site-1'" in server.spread(data, "site-1").reason
        assert server.spread(data, "site-0").outcome == "accepted"
        stranger = Site(tmp_path / "else", "stranger", draw_shard(9, 4), NAMES)
        assert "none described" in server.spread(stranger.spread(server.outline()), "stranger").reason
        larger = Site(tmp_path / "else", "larger", draw_shard(50, 4), NAMES)
        with pytest.raises(InputError, match="made for at most 12"):
            larger.spread(server.outline())


# ------------------------------------------------------------------------------------------------------- fuzzing


def consistent(stats: Statistics, encoding: Encoding) -> bool:
    """By another route: the eigenvalues of the whole moment matrix [Phi Y]'[Phi Y], and arithmetic on the counts."""
    counts = stats.class_counts
    top = torch.cat([stats.autocorrelation, stats.crosscorrelation], 1)
    joint = torch.cat([top, torch.cat([stats.crosscorrelation.T, torch.diag(counts)], 1)])
    values = torch.linalg.eigvalsh(joint)
    # What the check lets pass as rounding: a few hundredths of n at 16 bits.
    return float(counts.sum()) == stats.n_samples and float(values[0]) >= -0.1 * stats.n_samples


def fate(data: bytes) -> str:
    terms, _, landmarks, *_ = running()
    try:
        contribution = decode(data, terms)
        check(contribution, terms, landmarks)
    except InputError:
        return "refused"
    encoding = landmarks.encoding(terms)
    assert consistent(encoding.decode(torch.from_numpy(contribution.integers)), encoding)
    return "accepted"


def fates(changed: st.SearchStrategy[bytes], n: int) -> Counter[str]:
    counted = Counter[str]()

    @settings(max_examples=n)
    @given(changed)
    def attempt(data: bytes) -> None:
        counted[fate(data)] += 1

    attempt()
    return counted


@st.composite
def changed_bytes(draw: st.DrawFn, *, low: bool) -> bytes:
    """A genuine contribution with a few of its large sums changed: in the lower bytes of integers, or in any."""
    terms, _, landmarks, *_ = running()
    n = landmarks.encoding(terms).layout.parts[0].size
    places = sorted(draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=4)))
    bits = [draw(st.integers(1, 255)) << (0 if low else draw(st.sampled_from([0, 7]))) for _ in places]

    def changed(vector: np.ndarray, encoding: Encoding) -> None:
        vector[places] = np.sign(vector[places]) * (np.abs(vector[places]) ^ bits)

    return resealed(changed, draw(st.sampled_from([0, 1])))


@st.composite
def changed_header(draw: st.DrawFn) -> bytes:
    _, _, _, sites, agreement = running()
    data = bytearray(sites[0].statistics(agreement))
    for place in draw(st.sets(st.integers(0, 7 + int.from_bytes(data[:8], "little")), min_size=1, max_size=2)):
        data[place] ^= draw(st.integers(1, 255))
    return bytes(data)


def test_unchanged_contributions_are_accepted():
    _, _, _, sites, agreement = running()
    assert [fate(site.statistics(agreement)) for site in sites] == ["accepted"] * 4


def test_changed_headers_are_refused_or_harmless():
    counted = fates(changed_header(), 100)
    assert counted["refused"] >= 0.9 * counted.total(), counted


def test_changed_integers_are_refused_or_harmless():
    """In their lower bytes they are still the sums of some rows, up to rounding; in their upper ones they are not."""
    counted = fates(changed_bytes(low=True), 60)
    assert counted["accepted"] >= 0.5 * counted.total(), counted
    counted = fates(changed_bytes(low=False), 100)
    assert min(counted["refused"], counted["accepted"]) >= 0.05 * counted.total(), counted


@given(data=st.binary(max_size=400))
def test_random_bytes_are_refused(data):
    terms, outline, *_ = running()
    for opener, agreed in ((decode, terms), (open_spread, outline), (open_landmarks, terms)):
        with pytest.raises(InputError):
            opener(data, agreed)


def test_the_error_that_is_allowed_for_bounds_what_rounding_does_and_is_of_its_size():
    terms, _, landmarks, sites, _ = running()
    rows = sites[1].train
    for bits, counts in ((16, None), (12, None), (16, torch.cat([torch.zeros(66), torch.ones(2), 2 * torch.ones(2)]))):
        encoding = landmarks.encoding(replace(terms, method=replace(terms.method, bits=bits)))
        labels = rows.labels if counts is None else counts.long()
        exact = statistics(landmarks.feature_map(terms.normaliser()(rows.features)), one_hot(labels, 3))
        worst, size = 0.0, torch.outer(encoding.columns.double(), encoding.columns.double()).sqrt()
        basis = encoding.basis.dense
        turned = torch.linalg.solve_triangular(basis, scatter(exact), upper=False)
        turned = torch.linalg.solve_triangular(basis, turned.T, upper=False)
        for seed in range(100):
            told = encoding.told(encoding.encode(exact, uniform(seed, torch.device("cpu")))[0])
            worst = max(worst, float(torch.linalg.matrix_norm((scatter(told) - turned) / size, 2)))
        allowed = scatter_error(told, encoding)
        assert worst <= allowed <= 16 * worst


def scatter(stats: Statistics) -> torch.Tensor:
    return stats.autocorrelation - stats.crosscorrelation / stats.class_counts @ stats.crosscorrelation.T
