"""What a sum may reveal is bounded, and sites check it before they send; what is refused says what to do."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apfl.data.federation import Shard
from apfl.errors import InputError
from apfl.federate import Coordinator, Site, Terms
from apfl.federate.masked.counts import Counts, outline_of
from apfl.federate.masked.inprocess import MaskedFederation
from apfl.federate.masked.purposes import WIDE, Purpose
from apfl.federate.messages import open_publication
from apfl.federate.secure import enlist
from apfl.federate.secure.digits import Digits
from apfl.maths.bits import Layout, Part
from apfl.maths.dither import dither
from apfl.maths.integers import Encoding, Rounding
from apfl.maths.ridge import one_hot
from tests.federate.federation_toys import FIXED as RANDOM
from tests.federate.federation_toys import NAMES, draw_shard
from tests.federate.masked.toys import METHOD, masked_sites, masked_terms

FIXED = replace(METHOD, gamma=1.0, beta=1.0, balance=0.5, tau=0.0, weight=1.0)
NEEDS = "needs the flower extra: pip install 'apfl[flower]'"

# ---------------------------------------------------------------------------------------------------------- terms


def test_masked_terms_state_what_no_site_may_say_by_itself():
    with pytest.raises(InputError, match=r"map='random' given.*Give map='landmarks' too"):
        masked_terms(RANDOM)
    with pytest.raises(InputError, match=r"without class_names, n_features given.*must state the classes"):
        Terms("f", method=METHOD, masked=True)
    with pytest.raises(InputError, match="without n_features given"):
        masked_terms(n_features=None)
    with pytest.raises(InputError, match=r"max_share=0.5 given: nobody sees a site's share.*Give max_rows instead"):
        masked_terms(max_share=0.5)
    with pytest.raises(InputError, match="without class_names, n_features given"):
        Terms.checked({"federation": "f", "masked": True})


def test_masked_terms_keep_no_contributions_and_travel():
    terms = masked_terms()
    assert not terms.keep_contributions
    assert Terms.from_json(terms.to_json()) == terms
    assert (terms.smallest_sum, masked_terms(min_cohort=7).smallest_sum) == (3, 7)
    plain = replace(terms, masked=False)
    assert "masked" not in json.loads(plain.to_json())  # terms of before there were masks keep their digest
    assert plain.departs_from(terms) == "masked"  # a site that agreed to masks refuses to go on without


# --------------------------------------------------------------------------------------------------------- counts


def counts(rows: list[int], holders: list[int]) -> Counts:
    return Counts("f", "fingerprint", tuple(rows), tuple(holders))


def test_a_class_needs_two_holders_and_twenty_rows():
    found = counts([20, 19, 500, 0, 20], [2, 5, 1, 0, 3])
    assert found.admitted == (True, False, False, False, True)
    assert found.n_samples == 40
    told = found.withheld(["ant", "bee", "cat", "dog", "eel"])
    assert list(told) == ["bee", "cat"]
    assert "19 rows at 5" in told["bee"]
    with pytest.raises(InputError, match="1 classes have 20 rows at 2 sites or more"):
        counts([20, 19, 500], [2, 5, 1]).check(masked_terms())


def test_the_width_is_at_most_a_quarter_of_the_rows():
    enough, short = counts([60, 60, 40], [3, 3, 3]), counts([60, 60, 39], [3, 3, 3])
    assert outline_of(masked_terms(), enough).width == 40
    with pytest.raises(InputError, match=r"40 columns given, and 159 rows.*Allowed are 39 columns"):
        outline_of(masked_terms(), short)
    open_width = masked_terms(replace(METHOD, d_primary="auto"))
    assert outline_of(open_width, short).width == 39
    assert outline_of(open_width, counts([20_000] * 3, [3] * 3)).width == 5120


def test_full_moments_need_four_rows_for_each_feature():
    narrow = masked_terms(replace(METHOD, d_primary=8), n_features=30)
    few, enough = counts([40, 40, 39], [3] * 3), counts([40, 40, 40], [3] * 3)
    assert outline_of(narrow, few).spread == "diagonal"
    full = outline_of(narrow, enough)
    assert full.spread == "full"
    with pytest.raises(InputError, match=r"all products of 30 features asked for, and 119 rows.*120 are needed"):
        few.check(full)
    assert outline_of(masked_terms(replace(METHOD, landmarks="free")), counts([60] * 3, [3] * 3)).spread is None


def test_counts_travel_as_they_are_written_and_in_no_other_way():
    found = counts([20, 19], [2, 5])
    assert Counts.from_bytes(found.to_bytes()) == found
    for damaged in (
        b"", b"[]", b"{}", found.to_bytes() + b" ", found.to_bytes().replace(b"20", b"-1"),
        found.to_bytes().replace(b"20", b"20.5"), found.to_bytes().replace(b"20", b"true"),
        found.to_bytes().replace(b"20, 19", b"20"), replace(found, ranges=(64,)).to_bytes(),
        replace(found, sizes=(1,) * 33).to_bytes(), b"{" * 100_000, b'"' + b"x" * 2**21 + b'"',
    ):  # fmt: skip
        with pytest.raises(InputError, match="counts that cannot be read"):
            Counts.from_bytes(damaged)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_reader_of_counts_refuses_or_reads_what_was_written(data):
    found = counts(data.draw(st.lists(st.integers(0, 9), min_size=2, max_size=2)), [1, 2])
    found = replace(found, sizes=(0, 3), ranges=(-1, 33, 40))
    text = bytearray(found.to_bytes())
    place = data.draw(st.integers(0, len(text) - 1))
    text[place] = data.draw(st.integers(0, 255))
    try:
        read = Counts.from_bytes(bytes(text))
    except InputError:
        assert bytes(text) != found.to_bytes()
        return
    assert read.to_bytes() == bytes(text)


def test_some_changed_counts_are_read():
    """So that a reader which refuses everything fails."""
    text = counts([1, 2], [1, 2]).to_bytes()
    read = 0
    for place in range(len(text)):
        for byte in (ord("7"), ord("x")):
            try:
                Counts.from_bytes(text[:place] + bytes([byte]) + text[place + 1 :])
                read += 1
            except InputError:
                continue
    assert 20 <= read <= 60  # digits of numbers, letters of names


# --------------------------------------------------------------------------------------------------------- digits


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_sums_of_digits_are_digits_of_sums(data):
    part = st.tuples(st.integers(0, 5), st.integers(1, 32), st.booleans()).filter(lambda p: p[1] > 1 or not p[2])
    shapes = data.draw(st.lists(part, min_size=1, max_size=4).filter(lambda found: any(p[0] for p in found)))
    layout = Layout(tuple(Part(str(i), *shape) for i, shape in enumerate(shapes)))
    n = data.draw(st.integers(1, 5))
    digits = Digits(layout, n)
    low, high = (np.concatenate([np.full(p.size, getattr(p, end)) for p in layout.parts]) for end in ("low", "high"))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    vectors = [rng.integers(low, high, endpoint=True) for _ in range(n)]
    vectors[0] = high.copy()
    total = sum(digits.split(vector) for vector in vectors)
    assert int(total.max()) < 2**digits.sum_bits
    assert len(total) == digits.length
    np.testing.assert_array_equal(digits.join(total, n), sum(vectors))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_sums_within_their_bounds_need_no_more_room_than_these(data):
    """Whatever the members' ranges are; a sum at its bound comes back, and the modulus is never wider than without."""
    bits, n = data.draw(st.integers(4, 30)), data.draw(st.integers(2, 50))
    layout = Layout((Part("a", 40, bits), Part("b", 7, 20), Part("c", 5, 9, signed=False)))
    bound = data.draw(st.integers(1, n * layout.parts[0].high))
    digits, plain = Digits(layout, n, {"a": bound}), Digits(layout, n)
    assert digits.length * digits.sum_bits <= plain.length * plain.sum_bits
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    low, high = (np.concatenate([np.full(p.size, getattr(p, end)) for p in layout.parts]) for end in ("low", "high"))
    vectors = rng.integers(low, high, (n, layout.size), endpoint=True)
    # Entries of any size whose sum is the bound, or minus the bound, or something between.
    wanted = np.concatenate([[bound, -bound], rng.integers(-bound, bound, 38, endpoint=True)])
    own = vectors[:, :40]
    for k in range(n):
        own[k] = np.clip(wanted - own[:k].sum(0) - own[k + 1 :].sum(0), -layout.parts[0].high, layout.parts[0].high)
    assert int(np.abs(own.sum(0)).max()) == bound
    sums = sum(digits.split(vector).astype(object) for vector in vectors)
    total = np.array([int(each) % 2**digits.sum_bits for each in sums], np.uint64)
    np.testing.assert_array_equal(digits.join(total, n), vectors.sum(0))


def test_a_sum_beyond_its_bound_comes_back_wrong():
    """So somebody has to see that it is: `Cohort` does."""
    digits = Digits(Layout((Part("a", 100, 10),)), 100, {"a": 2000})
    assert (digits.sum_bits, digits.whole) == (12, ("a",))
    total = np.full(100, 2048 % 2**12, np.uint64)
    assert digits.join(total, 100).tolist() == [-2048] * 100


def test_statistics_say_what_their_entries_can_be():
    """Cauchy and Schwarz, on integers of real rows, one site or several: no entry passes what the diagonal allows."""
    rng = np.random.default_rng(0)
    columns, beyond = torch.from_numpy(rng.uniform(0.2, 3.0, 12)), []
    columns[:2] = 0.1  # the largest of the diagonal, and
    for bits in (8, 12, 20):
        encoding = Encoding(Rounding.for_rows(bits, 60), columns, 3)
        vectors = []
        for k in range(5):
            phi = torch.from_numpy(rng.normal(size=(20 + 10 * k, 12)) * rng.exponential(1.0, 12))
            phi[:, 1] = phi[:, 0]  # equal: such columns come up to the bound
            labels = one_hot(torch.from_numpy(rng.integers(0, 3, len(phi))), 3)
            vectors.append(encoding.encode_rows(phi, labels, dither(k, "x", phi.device), (0, None))[0])
        for n in (1, 5):
            told = encoding.bounds_told(sum(vectors[-n:]).numpy(), n)
            for name, most in told.items():
                assert int(sum(vectors[-n:])[encoding.layout.places[name]].abs().max()) <= most
        beyond.append(told["below"] / int(sum(vectors)[encoding.layout.places["below"]].abs().max()))
    assert min(beyond) < 1.2  # and the bound is not far from them


def test_a_sum_outside_the_range_of_its_members_is_refused():
    digits = Digits(Layout((Part("a", 2, 16), Part("b", 1, 20, signed=False))), 3)
    total = digits.split(np.array([32767, -32767, 5]))
    with pytest.raises(InputError, match="a: a sum that 1 sites cannot have"):
        digits.join(total + digits.split(np.array([32767, -32767, 5])), 1)
    with pytest.raises(InputError, match="digits given"):
        digits.join(total[1:], 1)


def test_statistics_cost_little_more_than_their_own_bits():
    """16 bits and those that a sum of a hundred needs, also with parts of 32 bits: at most 1.6 times the plain."""
    layout = Layout((Part("below", 500_000, 16), Part("diagonal", 1000, 32), Part("counts", 100, 32, signed=False)))
    digits = Digits(layout, 100)
    assert (digits.bits, digits.sum_bits) == (16, 23)
    assert digits.length * digits.sum_bits <= 1.6 * 8 * layout.n_bytes


# ---------------------------------------------------------------------------------------------- in the federation


def summed_up(folder, room, monkeypatch, **given) -> tuple[np.ndarray, list[int]]:
    """The sum of statistics, and the numbers of the sums that were made for it."""
    monkeypatch.setattr("apfl.federate.masked.purposes.ROOM", {"federation": room})
    made = []
    with Coordinator(folder / "server", masked_terms(replace(FIXED, bits=20))) as server:
        federation = MaskedFederation(server, masked_sites(folder), **given)
        begin = federation.cohort.begin

        def noted(purpose):
            made.extend([purpose.number] * (purpose.what == "statistics"))
            return begin(purpose)

        federation.cohort.begin = noted
        federation.sum_up()
        told = {row["what"] for row in server.ledger.events(20)}
        assert ("repeats statistics" in told) == (len(made) > 1)
        return server.pool.running().vector, made


def test_a_sum_that_its_room_may_not_hold_is_made_once_more_with_room_for_everything(tmp_path, monkeypatch):
    pytest.importorskip("cryptography", reason=NEEDS)
    usual, once = summed_up(tmp_path / "usual", 2.0, monkeypatch)
    narrow, twice = summed_up(tmp_path / "narrow", 1e-9, monkeypatch)
    assert (once, twice) == ([0], [0, WIDE])
    np.testing.assert_array_equal(usual, narrow)


def test_it_is_made_once_more_over_the_very_same_sites(tmp_path, monkeypatch):
    """Of two sums over different sites the difference would tell one of them."""
    pytest.importorskip("cryptography", reason=NEEDS)
    rounds = []

    def leaves(what: str, phase: str, name: str) -> bool:
        rounds.append((what, phase, name))
        second = rounds.count((what, "advertise", "site-0")) > 1
        return not (what == "statistics" and second and name == "site-2")

    with pytest.raises(InputError, match="the difference would tell a single site"):
        summed_up(tmp_path, 1e-9, monkeypatch, answers=leaves)


def test_a_class_that_one_site_has_stays_out_of_every_sum(tmp_path):
    """And a class of too few rows; they still serve the site's own model."""
    pytest.importorskip("cryptography", reason=NEEDS)
    sites = masked_sites(tmp_path, (60, 70, 60))
    alone = draw_shard(70, 11)
    rare = torch.cat([alone.labels[:60], torch.full((10,), 2)])  # cat, whose rows at the others become those of bee
    sites[1] = Site(tmp_path / "sites", "site-1", Shard(alone.features, rare), NAMES, rounding_seed=1)
    for place in (0, 2):
        site = sites[place]
        site.train = Shard(site.train.features, site.train.labels.clamp_max(1))
    with Coordinator(tmp_path / "server", masked_terms(replace(FIXED, d_primary=24))) as server:
        federation = MaskedFederation(server, sites)
        federation.run()
        found = federation.cohort.counts
        n_cat = int((sites[1].train.labels == 2).sum())
        assert (found.rows[2], found.holders[2]) == (n_cat, 1)
        published = open_publication(server.current().data, server.terms)
        assert published.class_counts.tolist() == [found.rows[0], found.rows[1], 0.0]
        np.testing.assert_array_equal(published.weights[:, 2].abs().max(), 0)
        assert sites[1]._usable(server.terms).labels.max() == 2


def test_a_site_refuses_a_sum_beyond_its_bounds_whatever_the_server_says(tmp_path):
    pytest.importorskip("cryptography", reason=NEEDS)
    with Coordinator(tmp_path / "server", masked_terms(FIXED)) as server:
        federation = MaskedFederation(server, masked_sites(tmp_path))
        federation.sum_up()
        site, agreement = federation.masked["site-0"], server.settle()
        question = federation.cohort.begin(Purpose("statistics")).aggregator.questions()["site-0"]
        told = federation.cohort.counts
        with pytest.raises(InputError, match=r"40 columns given, and 60 rows over all sites"):
            site.answer("advertise", question, agreement, replace(told, rows=(20, 20, 20)).to_bytes())
        with pytest.raises(InputError, match="counts of another roster"):
            site.answer("advertise", question, agreement, replace(told, roster="0" * 64).to_bytes())
        with pytest.raises(InputError, match="a round with another purpose"):
            site.answer("advertise", question, agreement, replace(told, rows=(900, 900, 900)).to_bytes())


def test_late_sites_join_as_a_group_with_counts_of_their_own(tmp_path):
    pytest.importorskip("cryptography", reason=NEEDS)
    early, late = masked_sites(tmp_path, (70, 60, 60)), masked_sites(tmp_path, (70, 60, 60), start=3)
    with Coordinator(tmp_path / "server", masked_terms(FIXED)) as server:
        first = MaskedFederation(server, early)
        first.run()
        before = server.pool.running().vector
        with pytest.raises(InputError, match=r"a roster of 2 sites given; a sum under these terms has 3 or more"):
            MaskedFederation(server, late[:2])
        with pytest.raises(InputError, match="site-0 is in a sum already"):
            MaskedFederation(server, [early[0], *late])
        small = masked_sites(tmp_path / "small", (20, 20, 20), start=7)
        with pytest.raises(InputError, match=r"40 columns given, and 43 rows"):
            MaskedFederation(server, small).sum_up()
        second = MaskedFederation(server, late)
        second.sum_up()
        publication = server.publish()
        assert publication.number == 2
        assert publication.n_samples == sum(len(site.train) for site in [*early, *late])
        second.sum_up()
        first.sum_up()
        first.refine()
        models = second.refine()
        assert len(models) == 3
        assert set(server.pool.members()) == {site.name for site in [*early, *late]}
        assert int((server.pool.running().vector - before)[-1]) >= 0


def test_reports_are_summed_and_a_site_that_does_not_report_adds_nothing(tmp_path):
    pytest.importorskip("cryptography", reason=NEEDS)
    from apfl.federate.masked.tables import summed

    sites = masked_sites(tmp_path, (70, 60, 60))
    with Coordinator(tmp_path / "server", masked_terms(FIXED)) as server:
        federation = MaskedFederation(server, sites)
        federation.run()
        federation.masked["site-1"].report = False
        federation.sum_of(Purpose("metrics", 1))
        told = [sites[k].evaluate(server.settle()) for k in (0, 2)]
        right = sum(round(each["accuracy"] * each["n_test"]) for each in told)
        assert [*summed(server.ledger, "metrics", 1).values()] == [[right, 80, 2]]


@pytest.mark.parametrize(
    ("what", "part", "value", "reason"),
    [
        ("statistics", "n_samples", 10_000, "n contradicts the class counts"),
        ("statistics", "below", 2**15 - 1, "indefinite beyond rounding|n contradicts the matrix"),
        ("statistics", "class_counts", 200, "n contradicts the class counts"),
        ("spread", "n_samples", 10_000, "moments of 10120 rows; the terms allow their sites 1 to 210"),
    ],
)
def test_the_server_refuses_a_sum_that_no_rows_have(tmp_path, what, part, value, reason):
    """It sees that one site lied, and not which."""
    pytest.importorskip("cryptography", reason=NEEDS)
    with Coordinator(tmp_path / "server", masked_terms(replace(FIXED, d_primary=24))) as server:
        federation = MaskedFederation(server, masked_sites(tmp_path, (60, 70, 60)))
        liar = federation.masked["site-1"]
        honest = liar._vector

        def lie(purpose, layout, *others):
            vector = honest(purpose, layout, *others).copy()
            if purpose.what == what:
                vector[layout.places[part]] = value
            return vector

        liar._vector = lie
        with pytest.raises(InputError, match=reason):
            federation.sum_up()
        assert server.current() is None


def test_a_site_keeps_to_the_fewest_sites_that_the_terms_promise(tmp_path):
    pytest.importorskip("cryptography", reason=NEEDS)
    sites, terms = masked_sites(tmp_path, (60, 70, 60, 60)), masked_terms(FIXED, min_cohort=4)
    with Coordinator(tmp_path / "server", terms) as server:
        trusting = enlist([site.name for site in sites], federation="f", minimum=3)
        with pytest.raises(
            InputError, match="the terms promise sums of 4 sites or more; this site would unmask one of 3"
        ):
            MaskedFederation(server, sites, trusting).sum_up()
        careful = MaskedFederation(server, sites, answers=lambda what, phase, name: name != "site-3")
        with pytest.raises(InputError, match="3 of 4 members are left and 4 are needed"):
            careful.sum_up()
