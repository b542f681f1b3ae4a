"""The pilot and the moments before it as masked sums: the plain choice, within the bounds, whoever drops out."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from apfl.data.federation import Shard
from apfl.errors import InputError
from apfl.federate import Coordinator, pilot, status_of
from apfl.federate.inprocess import simulate
from apfl.federate.masked.counts import Counts, counts_layout, outline_of
from apfl.federate.masked.inprocess import MaskedFederation
from apfl.federate.masked.pilot import counted, tried_under
from apfl.federate.masked.purposes import Purpose
from apfl.federate.messages import open_choice
from apfl.federate.secure import PHASES
from apfl.federate.secure.digits import CHANCE, Digits
from apfl.maths.bits import Layout, Part
from apfl.maths.moments_encoding import BUCKETS
from apfl.maths.pilot import describe
from tests.federate.masked.toys import METHOD, masked_sites, masked_terms

pytest.importorskip("cryptography", reason="needs the flower extra: pip install 'apfl[flower]'")

# The largest site has one row less than a power of two: then the plain step is the same.
SIZES = (40, 63, 60, 55, 50)
AUTO = replace(METHOD, normalise="auto", d_primary=24)
FIXED = replace(AUTO, gamma=1.0, beta=1.0, balance=0.5, tau=0.0)


def pilot_terms(method=AUTO, **others):
    return masked_terms(method, max_rows=None, **others)


# ------------------------------------------------------------------------------------------------------- presence


def test_a_sum_of_presence_tells_who_cares_that_somebody_has_it_and_no_more():
    """Over many draws the sum is uniform, whether one site has it or four; nobody's stays zero."""
    layout = Layout((Part("a", 1, 8, signed=False), Part("p", 3, 62, signed=False, presence=True)))
    digits, rng, drawn = Digits(layout, 5), np.random.default_rng(0), []
    assert digits.bits == 8
    for _ in range(2000):
        vectors = [np.append(k, rng.integers(0, 2**62, 3)) for k in range(4)]
        for k, vector in enumerate(vectors):
            vector[1:] *= [0, k == 1, 1]  # nobody's, one site's, everyone's
        total = sum(digits.split(vector) for vector in vectors) % 2**digits.sum_bits
        drawn.append(total[1:].reshape(-1, 3))
        assert digits.join(total, 4).tolist() == [0 + 1 + 2 + 3, 0, 1, 1]
    told = np.array(drawn)
    assert told.shape[1] * digits.sum_bits >= CHANCE
    assert not told[:, :, 0].any()
    for column in told[:, :, 1:].reshape(2000, -1).T:  # four tests
        assert chisquare(np.bincount(column >> digits.sum_bits - 4, minlength=16)).pvalue > 1e-6 / 4


def test_the_first_sum_tells_the_range_of_each_column_and_sites_by_size(tmp_path):
    sites, terms = masked_sites(tmp_path, SIZES), pilot_terms()
    digits = Digits(counts_layout(terms), len(sites))
    total = sum(digits.split(counted(site, terms)) for site in sites) % 2**digits.sum_bits
    found = Counts.of(digits.join(total, len(sites)), terms, "r")
    largest = torch.cat([site.train.features for site in sites]).abs().amax(0)
    assert all(
        4.0 ** (bucket - 32) >= top > 4.0 ** (bucket - 34)
        for bucket, top in zip(found.ranges, largest.tolist(), strict=True)
    )
    assert found.sizes[5] == len(sites)  # 32 to 63 rows
    assert found.most_rows == 63
    assert Counts.from_bytes(found.to_bytes()) == found
    # The same when asked again, and other numbers at another site: the sum of both would tell both otherwise.
    np.testing.assert_array_equal(counted(sites[0], terms), counted(sites[0], terms))
    first, second = (counted(site, terms)[-8 * BUCKETS :] for site in sites[:2])
    assert not np.intersect1d(first[first > 0], second[second > 0]).size


def test_ranges_are_told_before_moments_only():
    parts = {
        how: {part.name for part in counts_layout(masked_terms(replace(METHOD, normalise=how))).parts}
        for how in ("row", "root", "auto", "columns", "centred")
    }
    assert {how for how, names in parts.items() if "ranges" in names} == {"auto", "columns", "centred"}
    outline = outline_of(masked_terms(), Counts("f", "r", (60, 60, 60), (3, 3, 3), (0, 0, 0, 0, 0, 3)))
    assert "ranges" not in {part.name for part in counts_layout(outline).parts}
    assert outline.most_rows == 70  # as the terms state
    told = replace(masked_terms(), max_rows=None)
    assert outline_of(told, Counts("f", "r", (60, 60, 60), (3, 3, 3), (0, 0, 0, 0, 0, 3))).most_rows == 63


# --------------------------------------------------------------------------------------------------- as plain ones


@pytest.mark.parametrize("how", ["auto", pytest.param("centred", marks=pytest.mark.slow)])
def test_the_choice_the_landmarks_and_the_sum_are_the_plain_ones(tmp_path, monkeypatch, how):
    """With tables that the plain server does not bound, and maps as narrow as masks admit them."""
    monkeypatch.setattr("apfl.federate.choosing._Bounds", lambda ends, n_rows: lambda hits, k: hits)
    narrow = pilot._widest
    monkeypatch.setattr(pilot, "_widest", lambda terms, n_all: narrow(replace(terms, masked=True, max_share=1), n_all))
    terms, found = pilot_terms(replace(AUTO, normalise=how)), []
    for way, agreed in (("masked", terms), ("plain", replace(terms, masked=False))):
        simulate(masked_sites(tmp_path / way, SIZES), agreed, tmp_path / way / "server")
        with Coordinator(tmp_path / way / "server") as server:
            chosen, account = open_choice(server.choose(), server.terms), server.ledger.get("pilot")
            found.append((server.terms, account, server.landmarks(), server.pool.running().vector, chosen.setting))
    (masked, own, *_), (plain, other, *_) = found
    assert masked.method == plain.method
    assert masked.method.normalise == ("columns" if how == "auto" else how)
    if how == "auto":
        assert json.loads(own)["hits"] == json.loads(other)["hits"]
        assert masked.pilot == plain.pilot
    np.testing.assert_allclose(masked.mean, plain.mean, rtol=0, atol=1e-12)
    np.testing.assert_allclose(masked.std, plain.std, rtol=1e-12)
    assert found[0][2] == found[1][2]  # the landmarks, byte by byte
    np.testing.assert_array_equal(found[0][3], found[1][3])
    np.testing.assert_allclose(found[0][4], found[1][4], rtol=1e-9)


def test_every_sum_of_a_pilot_with_a_dropout_and_a_server_that_is_killed_after_each(tmp_path):
    """Each sum is asked for once, and what a pilot leaves is the account of its choice."""
    sites, heard = masked_sites(tmp_path, SIZES), []
    with Coordinator(tmp_path / "server", pilot_terms(FIXED)) as server:
        members = MaskedFederation(server, sites).members
    missing = {("moments", "site-0"), ("pilot", "site-1"), ("hits", "site-2")}  # from their masked vectors on

    def answers(what: str, phase: str, name: str) -> bool:
        return (what, name) not in missing or PHASES.index(phase) < 2

    while True:
        with Coordinator(tmp_path / "server") as server:
            federation = MaskedFederation(
                server, sites, members, answers, overhear=lambda *each: heard.append(each[:3])
            )
            purpose = federation.cohort.owed()
            if purpose is None:
                break
            survivors = federation.sum_of(purpose)
            assert len(survivors) == 5 - (purpose.what in ("moments", "pilot", "hits"))
            if purpose.what == "moments":
                asked = server.pilot.question
                rows = torch.cat([site.train.features for site in sites[1:]])
                np.testing.assert_allclose(asked.shared.features.sums, describe(rows).features.sums, atol=1e-9)
            if purpose.what == "hits":
                account = json.loads(server.ledger.get("pilot"))
                assert account["rows"] == sum(SIZES) - SIZES[1] - SIZES[2]  # site-1 is behind no primary: zeros
    assert [what for what, phase, name in heard if (phase, name) == ("advertise", "site-4")] == [
        "count", "moments", "pilot", "hits", "spread", "statistics",
    ]  # fmt: skip
    assert len(heard) == len(set(heard))
    kept = {path.name for path in (tmp_path / "server" / "blobs").iterdir()}
    assert not [name for name in kept if name.startswith("pilot")]
    assert status_of(tmp_path / "server")["pilot"]["normalise"] == "columns"


@st.composite
def absences(draw):
    """For each sum at most one of five sites, that stops answering it from some phase on."""
    sums = ("count", "moments", "pilot", "hits", "spread", "statistics")
    missing = {what: draw(st.one_of(st.none(), st.integers(0, 4))) for what in sums}
    return {(what, f"site-{k}"): draw(st.sampled_from(PHASES)) for what, k in missing.items() if k is not None}


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(absences())
def test_whoever_drops_out_of_a_pilot_costs_its_own_part_only(drop):
    """Every sum is that of the vectors of those who sent a masked one."""
    sent: dict[tuple[str, str], np.ndarray] = {}

    def answers(what: str, phase: str, name: str) -> bool:
        return (what, name) not in drop or PHASES.index(phase) < PHASES.index(drop[what, name])

    with TemporaryDirectory() as folder, Coordinator(Path(folder) / "server", pilot_terms(FIXED)) as server:
        federation = MaskedFederation(server, masked_sites(Path(folder), SIZES), answers=answers)
        for name, site in federation.masked.items():
            site._vector = partial(_noted, sent, name, site._vector)
        federation.cohort.take = partial(_compared, sent, drop, federation.cohort.take)
        federation.run()
        assert server.current() is not None


def _noted(sent, name, make, purpose, *others):
    sent[purpose.what, name] = make(purpose, *others)
    return sent[purpose.what, name]


def _compared(sent, drop, take, done):
    survivors, what = done.aggregator.survivors, done.purpose.what
    gone = {name for (each, name), phase in drop.items() if each == what and PHASES.index(phase) < 3}
    assert set(survivors) == {f"site-{k}" for k in range(5)} - gone
    total = done.digits.join(done.aggregator.total, len(survivors))
    expected = sum(sent[what, name] for name in survivors)
    for part in done.digits.layout.parts:
        own = done.digits.layout.places[part.name]
        wanted = np.any([sent[what, name][own] for name in survivors], 0) if part.presence else expected[own]
        np.testing.assert_array_equal(total[own], wanted)
    take(done)


# ---------------------------------------------------------------------------------------------------------- bounds


def begun(server, sites, until: str) -> MaskedFederation:
    federation = MaskedFederation(server, sites)
    while (purpose := federation.cohort.owed()) is not None and purpose.what != until:
        federation.sum_of(purpose)
    return federation


def test_sites_refuse_a_pilot_beyond_their_bounds(tmp_path):
    with Coordinator(tmp_path / "server", pilot_terms(FIXED)) as server:
        federation = begun(server, masked_sites(tmp_path, SIZES), "pilot")
        question = server.pilot.question
        assert {each.feature_map.width <= sum(SIZES) // 4 for each in question.candidates.values()} == {True}
        wide = pilot.seal_question(question.terms, 4 * question.n_all, replace_n(question.shared, 4), ())
        counts = federation.cohort.counts.to_bytes()
        asked = federation.cohort.begin(Purpose("pilot")).aggregator.questions()["site-0"]
        agreement, site = server.agreed.to_json().encode(), federation.masked["site-0"]
        with pytest.raises(InputError, match=r"a pilot of 1072 rows given, and 268 over all sites"):
            site.answer("advertise", asked, agreement, counts, pilot=wide)
        other = pilot.seal_question(question.terms, question.n_all, question.shared, ("root",))
        with pytest.raises(InputError, match=r"another length|another purpose"):
            site.answer("advertise", asked, agreement, counts, pilot=other)
        with pytest.raises(InputError, match="no pilot is under way"):
            site.answer("advertise", asked, server.invitation(), counts)


def test_changed_questions_and_primaries_are_refused_in_words_or_read(tmp_path):
    """One bit at fifty places of each; a round that was made for the true ones takes none of them."""
    with Coordinator(tmp_path / "server", pilot_terms(FIXED)) as server:
        federation = begun(server, masked_sites(tmp_path, SIZES), "hits")
        terms, counts = server.agreed, federation.cohort.counts
        question, primaries = server.pilot_question(), server.pilot_primaries()
        asked = federation.cohort.begin(Purpose("hits")).aggregator.questions()["site-0"]
        agreement, site, read = terms.to_json().encode(), federation.masked["site-0"], Counter()
        told = {"pilot": question, "primaries": primaries}
        for name, data in told.items():
            for place in range(len(data) - 1, 0, -max(1, len(data) // 50)):
                changed = told | {name: data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]}
                try:
                    trial = tried_under(terms, counts, changed["pilot"], changed["primaries"])
                    trial.opened()
                    read[name] += 1
                except InputError:
                    read[f"{name} refused"] += 1
                with pytest.raises(InputError):
                    site.answer("advertise", asked, agreement, counts.to_bytes(), **changed)
    # The lowest bits of a moment or of a weight say no untruth; a header or a place of a landmark does.
    assert read["pilot refused"] >= 10
    assert read["primaries"] >= 10
    assert sum(read.values()) >= 100


def replace_n(shared, times: int):
    return type(shared)(
        *(replace(each, n_samples=times * each.n_samples) for each in (shared.features, shared.root, shared.row))
    )


def test_a_class_that_a_pilot_would_have_hardly_any_rows_of_stays_out_of_it():
    found = Counts("f", "r", (40_000, 300, 100, 19), (5, 5, 5, 5))
    assert found.in_pilot(9_000) == (True, True, True, False)  # all rows take part
    assert found.in_pilot(40_400) == (True, True, False, False)  # a quarter: 75 and 25 of them
    assert found.admitted == (True, True, True, False)


def test_a_site_without_rows_in_a_pilot_adds_zeros(tmp_path, monkeypatch):
    sites = masked_sites(tmp_path, SIZES)
    with Coordinator(tmp_path / "server", pilot_terms(FIXED)) as server:
        federation = begun(server, sites, "pilot")
        monkeypatch.setattr(Counts, "in_pilot", lambda self, n_all: (False, True, True))
        alone = Shard(sites[0].train.features, torch.zeros_like(sites[0].train.labels))
        sites[0].train = alone
        federation.sum_of(Purpose("pilot"))
        federation.sum_of(Purpose("hits"))
        others = sum(int((site.train.labels > 0).sum()) for site in sites[1:])
        assert json.loads(server.ledger.get("pilot"))["rows"] == others


@pytest.mark.parametrize(
    ("what", "part", "value", "reason"),
    [
        ("moments", "root squares", 2**46, "moments that"),
        ("pilot", "root n_samples", 500, "n contradicts"),
        ("hits", "hits", 10_000, r"left-out hits of up to 10\d\d\d of 268 rows"),
    ],
)
def test_the_server_refuses_sums_that_no_rows_have(tmp_path, what, part, value, reason):
    with Coordinator(tmp_path / "server", pilot_terms(FIXED)) as server:
        federation = begun(server, masked_sites(tmp_path, SIZES), what)
        liar = federation.masked["site-1"]
        honest = liar._vector

        def lie(purpose, layout, *others):
            vector = honest(purpose, layout, *others).copy()
            vector[layout.places[part]] = value
            return vector

        liar._vector = lie
        with pytest.raises(InputError, match=reason):
            federation.sum_of(Purpose(what))


def test_a_site_that_leaves_during_a_pilot_starts_it_anew(tmp_path):
    sites = masked_sites(tmp_path, SIZES)
    with Coordinator(tmp_path / "server", pilot_terms(FIXED)) as server:
        begun(server, sites, "hits")
        server.leave("site-1")
        assert (server.agreed, server.piloting) == (server.draft, "")
        renewed = MaskedFederation(server, [sites[0], *sites[2:]])
        renewed.sum_up()
        assert json.loads(server.ledger.get("pilot"))["rows"] == sum(SIZES) - SIZES[1]
        assert sorted(server.pool.members()) == ["site-0", "site-2", "site-3", "site-4"]
