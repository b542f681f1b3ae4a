"""What must never reach the sum: every kind of malformed contribution, and bytes that nobody meant."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load as load_tensors

import apfl.federate.contribution as contribution_room
from apfl.errors import InputError
from apfl.federate import Coordinator, Site, Terms
from apfl.federate.contribution import ROUNDING, Contribution, check, check_statistics, decode, encode
from apfl.federate.messages import (
    open_choice,
    open_description,
    open_metrics,
    open_publication,
    open_table,
    seal_metrics,
    seal_table,
)
from apfl.federate.terms import Description, settle
from apfl.federate.wire import seal, sha256
from apfl.maths.ridge import Statistics, one_hot, statistics
from apfl.maths.wire import pack, unpack
from apfl.methods.apfl import APFL
from tests.federate.federation_toys import AUTO, FIXED, NAMES, contribute, draw_shard, make_sites, tabulate

D = 40  # columns of Phi; site-1 has 70 rows and sends a triangle, site-0 has 30 and sends a factor


@dataclass
class Message:
    """A contribution taken apart, to be put together again otherwise."""

    header: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    @staticmethod
    def of(data: bytes) -> Message:
        length = int.from_bytes(data[:8], "little")
        header = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["apfl"])
        return Message(header, load_tensors(data))

    def sealed(self) -> bytes:
        rest = {key: value for key, value in self.header.items() if key not in ("kind", "version")}
        return seal(self.header["kind"], rest, self.tensors)

    def scale(self, factor: float) -> None:
        for name in ("autocorrelation", "crosscorrelation"):
            self.tensors[name] = self.tensors[name] * (factor if name == "crosscorrelation" else factor**2)

    def matrix(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.tensors["autocorrelation"] = pack(change(unpack(self.tensors["autocorrelation"])))

    def count(self, n: int, counts: list[float]) -> None:
        self.header["n"] = n
        self.tensors["n_samples"] = torch.tensor(n)
        self.tensors["target_energy"] = torch.tensor(float(n), dtype=torch.float64)
        self.tensors["class_counts"] = torch.tensor(counts, dtype=torch.float64)


def entry(name: str, value: float) -> Callable[[Message], None]:
    def change(m: Message) -> None:
        m.tensors[name] = m.tensors[name].clone()
        m.tensors[name].view(-1)[0] = value

    return change


def header(name: str, value: Any) -> Callable[[Message], None]:
    return lambda m: m.header.update({name: value})


def tensor(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Message], None]:
    return lambda m: m.tensors.update({name: make(m.tensors[name])})


def without(name: str) -> Callable[[Message], None]:
    def change(m: Message) -> None:
        del m.tensors[name]

    return change


def dip(share: float) -> Callable[[Message], None]:
    """Push the smallest eigenvalue down to -share of the mean diagonal entry, along its own direction."""

    def change(matrix: torch.Tensor) -> torch.Tensor:
        values, vectors = torch.linalg.eigh(matrix)
        down = values[0] + share * matrix.diagonal().mean()
        lowered = matrix - down * torch.outer(vectors[:, 0], vectors[:, 0])
        return (lowered + lowered.T) / 2

    return lambda m: m.matrix(change)


def shrink_counts(m: Message) -> None:
    m.count(D, [D - 4.0, 2.0, 2.0])  # fewer rows than are behind the matrix
    m.tensors["echo"] = torch.where(m.tensors["echo"].cumsum(0) <= D, m.tensors["echo"], 0)  # and behind the echo


def asymmetric(m: Message) -> None:
    full = unpack(m.tensors["autocorrelation"])
    full[0, 1] += 1.0
    m.tensors["autocorrelation"] = full


def fractional(m: Message) -> None:
    counts = m.tensors["class_counts"].clone()
    counts[0] += 0.5
    counts[1] -= 0.5
    m.tensors["class_counts"] = counts


def moved_count(m: Message) -> None:
    counts = m.tensors["class_counts"].clone()
    counts[0] += counts[1] + 3
    counts[1] = -3.0
    m.tensors["class_counts"] = counts


def lone_row(m: Message) -> None:
    counts = m.tensors["class_counts"].clone()
    counts[0] += counts[1] - 1
    counts[1] = 1.0
    m.tensors["class_counts"] = counts


def empty_class(m: Message) -> None:
    counts = m.tensors["class_counts"].clone()
    counts[0] += counts[1]
    counts[1] = 0.0
    m.tensors["class_counts"] = counts


TRIANGLES: dict[str, tuple[Callable[[Message], None], str]] = {
    "NaN in the matrix": (entry("autocorrelation", float("nan")), "NaN or infinity"),
    "infinity in the class sums": (entry("crosscorrelation", float("inf")), "NaN or infinity"),
    "NaN in the counts": (entry("class_counts", float("nan")), "NaN or infinity"),
    "NaN in the energy": (entry("target_energy", float("nan")), "NaN or infinity"),
    "a full, asymmetric matrix": (asymmetric, r"autocorrelation of a statistics must be F64 \[820\]"),
    "indefinite": (dip(1.0), "indefinite"),
    "indefinite just beyond rounding": (dip(1e-11), "indefinite"),
    "negative diagonal": (entry("autocorrelation", -5.0), "indefinite"),
    "an absurd product": (entry("autocorrelation", 1e4), "n contradicts the matrix: trace"),
    "an absurd class sum": (entry("crosscorrelation", 1e200), "n contradicts the matrix"),
    "an absurd off-diagonal entry": (
        tensor("autocorrelation", lambda t: torch.cat([t[:1], t[1:2] + 1e250, t[2:]])),
        "indefinite",
    ),
    "class sums too long": (tensor("crosscorrelation", lambda t: 3 * t), "n contradicts the matrix"),
    "another map": (header("map", "0" * 64), "another feature map"),
    "narrower": (tensor("autocorrelation", lambda t: t[: 39 * 40 // 2].clone()), "must be F64"),
    "wider": (tensor("autocorrelation", lambda t: torch.zeros(41 * 42 // 2).double()), "must be F64"),
    "class sums of another width": (tensor("crosscorrelation", lambda t: t[:39].clone()), "must be F64"),
    "fewer classes": (tensor("crosscorrelation", lambda t: t[:, :2].clone()), "must be F64"),
    "counts of more classes": (tensor("class_counts", lambda t: torch.ones(4).double()), "must be F64"),
    "n of the header": (header("n", 71), "n contradicts itself"),
    "n of the message": (tensor("n_samples", lambda t: t + 1), "n contradicts itself"),
    "n against counts": (lambda m: m.count(80, [20.0, 20.0, 20.0]), "n contradicts the class counts"),
    "n and counts too small": (shrink_counts, "n contradicts the matrix"),
    "an echo of more rows": (tensor("echo", lambda t: 2 * t), "an echo that"),
    "an echo of nothing": (tensor("echo", lambda t: 0 * t), "an echo that"),
    "n below the width": (lambda m: m.count(30, [10.0, 10.0, 10.0]), "send the factor"),
    "energy": (entry("target_energy", 12.0), "target energy"),
    "fractional counts": (fractional, "whole numbers"),
    "negative counts": (moved_count, "whole numbers, 0 or more"),
    "a class with one row": (lone_row, "must be withheld"),
    "sums of an empty class": (empty_class, "class without rows"),
    "trace beyond n rows": (lambda m: m.scale(10.0), "n contradicts the matrix: trace"),
    "absurdly small": (lambda m: m.scale(1e-6), "absurd scale"),
    "absurdly large": (lambda m: m.scale(1e6), "absurd scale"),
    "another federation": (header("federation", "g"), "federation 'g'"),
    "replay of other terms": (header("terms", "0" * 64), "replay of another run"),
    "another client's name": (header("client", "site-9"), "sent by 'site-1'"),
    "a name with a path": (header("client", "../site-1"), "client name"),
    "another form": (header("form", "pickle"), "allowed are triangle and factor"),
    "another kind": (header("kind", "table"), "kind 'table'"),
    "a later version": (lambda m: None, "version 2"),
    "single precision": (tensor("autocorrelation", lambda t: t.float()), "must be F64"),
    "something more": (lambda m: m.tensors.update({"rows": torch.zeros(3)}), "this one holds"),
    "something less": (without("class_counts"), "this one holds"),
    "no n": (header("n", None), "whole number"),
    "an n beyond measure": (header("n", 10**30), "whole number"),
    "n as text": (header("n", "70"), "whole number"),
}

FACTORS: dict[str, tuple[Callable[[Message], None], str]] = {
    "NaN in the factor": (entry("factor", float("nan")), "NaN or infinity"),
    "targets too long": (tensor("turned_targets", lambda t: 2 * t), "n contradicts the matrix"),
    "targets too short": (tensor("turned_targets", lambda t: t / 2), "n contradicts the matrix"),
    "counts of other rows": (lambda m: m.count(30, [26.0, 2.0, 2.0]), "contradict"),
    "more rows than n": (lambda m: m.count(29, [9.0, 10.0, 10.0]), "must be F64"),
    "fewer rows than n": (lambda m: m.count(31, [11.0, 10.0, 10.0]), "must be F64"),
    "too large": (tensor("factor", lambda t: 10 * t), "n contradicts the matrix: trace"),
    "absurdly large": (tensor("factor", lambda t: 1e7 * t), "absurd scale"),
    "replay of other terms": (header("terms", "0" * 64), "replay of another run"),
}


@cache
def running() -> tuple[Terms, list[Site], bytes]:
    """Terms, sites and the agreement of one federation, made once."""
    folder = Path(mkdtemp())
    sites = make_sites(folder)
    with Coordinator(folder / "server", Terms("f", method=FIXED, class_names=NAMES)) as server:
        agreement = contribute(server, sites)
        return server.terms, sites, agreement


def check_refused(folder: Path, site: Site, data: bytes, reason: str) -> None:
    """Refused with the reason, written down, and the primary is that of the others alone."""
    _, sites, agreement = running()
    others = [each for each in sites if each is not site][:2]
    with Coordinator(folder / "server", Terms("f", method=FIXED, class_names=NAMES)) as server:
        for each in others:
            server.describe(each.describe(server.invitation()))
        assert server.settle() == agreement
        receipt = server.accept(data, site.name)
        assert receipt.outcome == "refused", receipt
        assert re.search(reason, receipt.reason), receipt.reason
        (written,) = server.status()["refusals"]
        assert (written["client"], written["reason"]) == (site.name, receipt.reason)
        assert (written["sha256"], written["bytes"]) == (sha256(data), len(data))
        for each in others:
            server.accept(each.statistics(agreement), each.name)
        assert server.publish().members == tuple(each.name for each in others)
        # The genuine one is still welcome.
        assert server.accept(site.statistics(agreement), site.name).outcome == "accepted"


@pytest.mark.parametrize("kind", TRIANGLES)
def test_a_malformed_triangle_is_refused(tmp_path, kind):
    _, sites, agreement = running()
    message = Message.of(sites[1].statistics(agreement))
    change, reason = TRIANGLES[kind]
    change(message)
    data = message.sealed()
    if kind == "a later version":
        data = data.replace(b'\\"version\\": 1', b'\\"version\\": 2')
    check_refused(tmp_path, sites[1], data, reason)


@pytest.mark.parametrize("kind", FACTORS)
def test_a_malformed_factor_is_refused(tmp_path, kind):
    _, sites, agreement = running()
    message = Message.of(sites[0].statistics(agreement))
    change, reason = FACTORS[kind]
    change(message)
    check_refused(tmp_path, sites[0], message.sealed(), reason)


def test_an_asymmetric_matrix_is_refused_wherever_it_comes_from():
    terms, sites, agreement = running()
    stats = decode(sites[1].statistics(agreement), terms).statistics
    matrix = stats.autocorrelation.clone()
    matrix[3, 4] += 1e-9
    with pytest.raises(InputError, match="asymmetric"):
        check_statistics(replace_matrix(stats, matrix), terms)


def replace_matrix(stats: Statistics, matrix: torch.Tensor) -> Statistics:
    return Statistics(matrix, stats.crosscorrelation, stats.class_counts, stats.n_samples, stats.target_energy)


@pytest.mark.parametrize("wire", ["float64", "float32"])
@pytest.mark.parametrize(("times", "passes"), [(0.3, True), (10.0, False)])
def test_rounding_is_told_from_an_indefinite_matrix(wire, times, passes):
    """The smallest eigenvalue at a fraction, and at a multiple, of what rounding may do."""
    terms, sites, _ = running()
    terms = replace(terms, wire=wire)
    contribution = decode(encode(*mapped(sites[1], terms), terms, "site-1"), terms)
    matrix = contribution.statistics.autocorrelation
    within = contribution.statistics
    values, vectors = torch.linalg.eigh(matrix)
    # Class sums orthogonal to that direction, so that the matrix alone is judged.
    cross = within.crosscorrelation - torch.outer(vectors[:, 0], vectors[:, 0] @ within.crosscorrelation)
    share = times * ROUNDING[wire]
    lowered = matrix - (values[0] + share * matrix.diagonal().mean()) * torch.outer(vectors[:, 0], vectors[:, 0])
    lowered = torch.tril(lowered) + torch.tril(lowered, -1).T
    tensors = dict(contribution.tensors) | {"autocorrelation": pack(lowered), "crosscorrelation": cross}  # unrounded
    changed = replace(contribution, tensors=tensors)
    if passes:
        check(changed, terms)
    else:
        with pytest.raises(InputError, match="indefinite"):
            check(changed, terms)


@pytest.mark.parametrize("wire", ["float64", "float32"])
def test_a_triangle_that_rounds_to_an_indefinite_one_goes_as_a_factor(monkeypatch, wire):
    terms, sites, _ = running()
    terms = replace(terms, wire=wire)
    phi, labels = mapped(sites[1], terms)
    with monkeypatch.context() as patched:
        patched.setattr(contribution_room, "_definite", lambda stats, terms: False)
        sent = decode(encode(phi, labels, terms, "site-1"), terms)
    assert (sent.form, sent.n_samples) == ("factor", 70)
    check(sent, terms)
    tolerance = 1e-12 if wire == "float64" else 1e-4  # 24 bits, relative to entries of up to a hundred
    plain = statistics(phi, one_hot(labels, 3))
    torch.testing.assert_close(sent.statistics.autocorrelation, plain.autocorrelation, rtol=tolerance, atol=tolerance)


def mapped(site: Site, terms: Terms) -> tuple[torch.Tensor, torch.Tensor]:
    z = terms.normaliser()(site.train.features)
    return terms.maps(z)[0](z), site.train.labels


@settings(max_examples=40)
@given(
    st.integers(6, 130), st.sampled_from(["float64", "float32"]), st.sampled_from(["relu", "identity", "cosine"]),
    st.booleans(), st.integers(0, 99), st.floats(0, 1),
)  # fmt: skip
def test_honest_rows_are_never_refused(n, wire, activation, intercept, seed, copied):
    """Whatever their number, also where some rows are copies of one another and the matrix is singular."""
    draft = Terms("f", method=replace(FIXED, activation_primary=activation, intercept=intercept), wire=wire)
    site = Site(Path("/nowhere"), "honest", draw_shard(n, seed), NAMES)
    features = site.train.features.clone()
    features[: int(copied * n)] = features[0]
    terms = settled(draft)
    z = terms.normaliser()(features)
    check(decode(encode(terms.maps(z)[0](z), site.train.labels, terms, "honest"), terms), terms)


@cache
def settled(draft: Terms) -> Terms:
    return settle(draft, [Description("honest", 100, 8, NAMES)])


def test_rows_that_cannot_be_used_are_refused_before_they_leave(tmp_path):
    _, _, agreement = running()
    shard = draw_shard(50, 3)
    shard.features[7, 2] = float("nan")
    with pytest.raises(InputError, match="NaN"):
        Site(tmp_path, "site-x", shard, NAMES).statistics(agreement)
    unscaled = replace(FIXED, normalise="none")
    with Coordinator(tmp_path / "server", Terms("f", method=unscaled, quorum=1)) as server:
        huge = draw_shard(50, 3)
        huge.features.mul_(1e6)
        site = Site(tmp_path, "huge", huge, NAMES)
        server.describe(site.describe(server.invitation()))
        with pytest.raises(InputError, match=r"absurd scale.*normalise='row'"):
            site.statistics(server.settle())


# ------------------------------------------------------------------------------------------- other messages


def test_other_messages_are_refused_too(tmp_path):
    sites = make_sites(tmp_path)
    with Coordinator(tmp_path / "server", Terms("f", method=AUTO)) as server:
        narrow = Site(tmp_path, "narrow", draw_shard(30, 0, n_features=5), NAMES)
        agreement = contribute(server, sites)
        assert "use the same backbone" in server.describe(narrow.describe(server.invitation()), "narrow").reason
        described = sites[0].describe(server.invitation())
        assert "sent by 'site-1'" in server.describe(described, "site-1").reason
        publication = server.publish()
        terms, number = server.terms, publication.number
        shape = terms.grid(1.0).shape
        too_many = seal_table(terms, "site-0", number, torch.full(shape, 31))
        assert "outside 0 to 30" in server.table(too_many, "site-0").reason
        below = seal_table(terms, "site-0", number, torch.full(shape, -1))
        assert "outside 0 to 30" in server.table(below, "site-0").reason
        early = seal_table(terms, "site-0", number + 1, torch.zeros(shape, dtype=torch.int64))
        assert "fetch the current one" in server.table(early, "site-0").reason
        other = seal_table(terms, "site-0", number, torch.zeros(2, 2, 2, dtype=torch.int64))
        assert "must be I64" in server.table(other, "site-0").reason
        with pytest.raises(InputError, match="no client has sent a table"):
            server.choose()
        choice = tabulate(server, sites)
        again = seal_table(terms, "site-0", number, torch.zeros(shape, dtype=torch.int64))
        assert "another table" in server.table(again, "site-0").reason
        assert "a fraction" in server.metrics(seal_metrics(terms, "site-0", 1, 1.5, 10), "site-0").reason
        with pytest.raises(InputError, match="give the choice too"):
            sites[0].refine(agreement, publication.data)
        with pytest.raises(InputError, match="kind 'table'"):
            sites[0].refine(agreement, early, choice)
        poisoned = Message.of(publication.data)
        poisoned.tensors["weights"][0, 0] = float("nan")
        with pytest.raises(InputError, match="NaN"):
            sites[0].refine(agreement, poisoned.sealed(), choice)
        assert not sites[0].model_path(terms).exists()


# -------------------------------------------------------------------------------------------------- fuzzing


def consistent(contribution: Contribution, terms: Terms) -> bool:
    """By another route: the eigenvalues of the whole moment matrix [Phi Y]'[Phi Y], and arithmetic on the counts."""
    stats = contribution.statistics
    counts = stats.class_counts
    joint = torch.cat(
        [
            torch.cat([stats.autocorrelation, stats.crosscorrelation], 1),
            torch.cat([stats.crosscorrelation.T, torch.diag(counts)], 1),
        ]
    )
    if not bool(torch.isfinite(joint).all()) or float(counts.sum()) != stats.n_samples:
        return False
    if stats.echo is not None and (bool((stats.echo < 0).any()) or stats.echo.long().sum() > stats.n_samples):
        return False
    # Both blocks on the scale of their own diagonal; ten times what the check allows for rounding.
    values = torch.linalg.eigvalsh(joint)
    return float(values[0]) >= -100 * ROUNDING[terms.wire] * float(joint.diagonal().sum())


OPENERS = [
    decode,
    open_description,
    open_publication,
    open_table,
    open_choice,
    open_metrics,
    lambda data, terms: Terms.from_json(data),
]


def test_every_opener_opens_its_own_message_and_no_other(tmp_path):
    """What the fuzzers below expect to be refused is not refused for want of anything that opens."""
    sites = make_sites(tmp_path)
    draft = Terms("f", method=AUTO, class_names=NAMES)
    with Coordinator(tmp_path / "server", draft) as server:
        agreement = contribute(server, sites)
        terms, publication = server.terms, server.publish().data
        table = sites[0].table(agreement, publication)
        genuine = [
            sites[0].statistics(agreement),
            sites[0].describe(server.invitation()),
            publication,
            table,
            tabulate(server, sites),
            seal_metrics(terms, "site-0", 1, 0.5, 10),
            terms.to_json().encode(),
        ]
    for i, opener in enumerate(OPENERS):
        for j, data in enumerate(genuine):
            if i == j:
                opener(data, draft if opener is open_description else terms)
            else:
                with pytest.raises(InputError):
                    opener(data, terms)


@pytest.mark.parametrize("opener", OPENERS)
@given(data=st.binary(max_size=400))
def test_random_bytes_are_refused(opener, data):
    with pytest.raises(InputError):
        opener(data, running()[0])


@pytest.mark.parametrize("opener", OPENERS)
@given(text=st.recursive(st.none() | st.booleans() | st.floats() | st.text(max_size=5), st.lists, max_leaves=8))
def test_headers_of_any_json_are_refused(opener, text):
    for listed in (
        text,
        {"__metadata__": text},
        {"__metadata__": {"apfl": json.dumps(text)}},
        {"__metadata__": {"apfl": json.dumps({"kind": "statistics", "version": 1, "n": text})}, "factor": text},
    ):
        inner = json.dumps(listed).encode()
        with pytest.raises(InputError):
            opener(len(inner).to_bytes(8, "little") + inner, running()[0])


def test_deep_nesting_and_absurd_sizes_are_refused_before_anything_is_allocated():
    terms, sites, agreement = running()
    deep = b"[" * 200_000
    with pytest.raises(InputError):
        decode(len(deep).to_bytes(8, "little") + deep, terms)
    with pytest.raises(InputError, match="no message"):
        decode((2**63).to_bytes(8, "little") + b"{}", terms)
    data = sites[1].statistics(agreement)
    with pytest.raises(InputError, match="bytes; "):
        decode(data + b"\0", terms)
    with pytest.raises(InputError, match="bytes; "):
        decode(data[:-1], terms)
    with pytest.raises(InputError, match="must be F64"):
        decode(data.replace(b'"shape":[820],', b'"shape":[999],'), terms)
    length = int.from_bytes(data[:8], "little")
    claimed = data[8 : 8 + length].replace(b"[820]", b"[820000000000]")
    with pytest.raises(InputError, match="must be F64"):
        decode(len(claimed).to_bytes(8, "little") + claimed + data[8 + length :], terms)


def judge(data: bytes, terms: Terms) -> str:
    """What becomes of a contribution: refused, or accepted, and then still the sums of some rows."""
    try:
        contribution = decode(data, terms)
        check(contribution, terms)
    except InputError:
        return "refused"
    assert consistent(contribution, terms)
    return "accepted"


def fates(changed: st.SearchStrategy[bytes], n: int) -> Counter[str]:
    """How many of ``n`` changed messages are refused and how many accepted, to see that a fuzzer tries both."""
    terms, counted = running()[0], Counter[str]()

    @settings(max_examples=n)
    @given(changed)
    def attempt(data: bytes) -> None:
        counted[judge(data, terms)] += 1

    attempt()
    return counted


@st.composite
def changed_bytes(draw: st.DrawFn, *, in_header: bool) -> bytes:
    """A genuine contribution with a few bytes of its header, or of its numbers, changed."""
    _, sites, agreement = running()
    data = bytearray(sites[draw(st.sampled_from([0, 1]))].statistics(agreement))
    middle = 8 + int.from_bytes(data[:8], "little")
    first, stop = (0, middle) if in_header else (middle, len(data))
    for place in draw(st.sets(st.integers(first, stop - 1), min_size=1, max_size=2 if in_header else 4)):
        data[place] ^= draw(st.integers(1, 255))
    return bytes(data)


@st.composite
def changed_number(draw: st.DrawFn) -> bytes:
    """The same with a whole number in place of bytes, near the genuine one, where a flipped byte rarely lands."""
    _, sites, agreement = running()
    message = Message.of(sites[draw(st.sampled_from([0, 1]))].statistics(agreement))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    name = rng.choice(sorted(set(message.tensors) - {"n_samples"}))
    values = message.tensors[name].clone()
    at = rng.integers(values.numel())
    change = float(rng.normal()) * 10 ** draw(st.floats(-9, 3))
    values.view(-1)[at] += change if values.is_floating_point() else round(change)
    message.tensors[name] = values
    return message.sealed()


def test_unchanged_contributions_are_accepted():
    terms, sites, agreement = running()
    assert [judge(site.statistics(agreement), terms) for site in sites] == ["accepted"] * 4


def test_changed_headers_are_refused_or_harmless():
    """Next to no byte of a header is harmless; that one which is unchanged is accepted, the test above asserts."""
    counted = fates(changed_bytes(in_header=True), 200)
    assert counted["refused"] >= 0.95 * counted.total(), counted


def test_changed_bytes_are_refused_or_harmless():
    """Numbers that change in their last digits are still the sums of some rows; in their exponents they are not."""
    counted = fates(changed_bytes(in_header=False), 200)
    assert min(counted["refused"], counted["accepted"]) >= 0.05 * counted.total(), counted


def test_changed_numbers_are_refused_or_harmless():
    """Of numbers near the genuine ones, those within rounding are accepted."""
    counted = fates(changed_number(), 100)
    assert min(counted["refused"], counted["accepted"]) >= 0.2 * counted.total(), counted


def test_a_contribution_to_another_federation_with_the_same_terms_is_a_replay(tmp_path):
    _, sites, agreement = running()
    with Coordinator(tmp_path / "server", Terms("g", method=FIXED, class_names=NAMES)) as server:
        for site in sites:
            server.describe(site.describe(server.invitation()))
        server.settle()
        assert "federation 'f'" in server.accept(sites[0].statistics(agreement), "site-0").reason
    method = APFL(
        map="random", d_primary=40, d_refinement=24, gamma=2.0, beta=1.0, balance=0.5, tau=0.0, normalise="root"
    )
    with Coordinator(tmp_path / "again", Terms("f", method=method, class_names=NAMES)) as server:
        elsewhere = make_sites(tmp_path / "again")
        for site in elsewhere:
            server.describe(site.describe(server.invitation()))
        server.settle()
        assert "replay" in server.accept(sites[0].statistics(agreement), "site-0").reason
