"""A masked federation comes to what the plain one comes to, bit for bit, whoever drops out when."""

from __future__ import annotations

import io
import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from apfl.errors import InputError
from apfl.federate import Coordinator, Site, Terms, status_of
from apfl.federate.contribution import decode
from apfl.federate.inprocess import simulate
from apfl.federate.landmarks import Landmarks, draw, open_spread, seal_landmarks
from apfl.federate.masked.inprocess import MaskedFederation
from apfl.federate.masked.purposes import Purpose, round_of
from apfl.federate.masked.site import MaskedSite
from apfl.federate.masked.tables import summed
from apfl.federate.messages import open_choice, open_publication
from apfl.federate.secure import PHASES, Member
from apfl.federate.secure.masks import pack, words
from apfl.federate.secure.ring import threshold
from apfl.federate.wire import sha256
from apfl.models.file import read
from apfl.report.status import status_view
from tests.federate.federation_toys import NAMES, draw_shard, seen
from tests.federate.masked.toys import METHOD, SIZES, masked_sites, masked_terms

pytest.importorskip("cryptography", reason="needs the flower extra: pip install 'apfl[flower]'")

FIXED = replace(METHOD, gamma=1.0, beta=1.0, balance=0.5, tau=0.0, weight=1.0)
SENDING = ("advertise", "share", "mask")  # who drops out in these is not in the sum


def vectors(site: Site, terms: Terms) -> np.ndarray:
    """What a site adds to the sum of statistics."""
    return decode(site.own_statistics(terms), terms).integers


@pytest.mark.parametrize(
    "method",
    [
        METHOD,
        pytest.param(replace(FIXED, bits=13, landmarks="free"), marks=pytest.mark.slow),
        pytest.param(
            replace(METHOD, bits=32, sketch=16, scope="client", normalise="root", gamma=1.0), marks=pytest.mark.slow
        ),
    ],
    ids=["tables", "free", "own"],
)
def test_everything_equals_the_plain_federation_bit_for_bit(tmp_path, monkeypatch, method):
    """Tables that the plain server does not bound: under masks it sees none to bound."""
    monkeypatch.setattr("apfl.federate.choosing._Bounds", lambda ends, n_rows: lambda hits, k: hits)
    terms = masked_terms(method)
    for way, agreed in (("masked", terms), ("plain", replace(terms, masked=False))):
        simulate(masked_sites(tmp_path / way), agreed, tmp_path / way / "server")
    sums, published, chosen, models = [], [], [], []
    for way in ("masked", "plain"):
        with Coordinator(tmp_path / way / "server") as server:
            sums.append(server.pool.running().vector)
            published.append(seen(server.current(), server.terms))
            chosen.append(open_choice(server.choose(), server.terms) if server.terms.wants_tables else None)
        paths = [tmp_path / way / "sites" / "f" / f"site-{k}" / "model.safetensors" for k in range(len(SIZES))]
        models.append([read(path) for path in paths])
    np.testing.assert_array_equal(*sums)
    for name in ("class_counts", "weights"):
        np.testing.assert_array_equal(*(getattr(each, name).numpy() for each in published))
    assert len({(each.gamma, each.n_samples) for each in published}) == 1
    assert published[0].n_samples == sum(SIZES)
    assert len({each and (each.plan.weight, each.setting, each.n_samples) for each in chosen}) == 1
    assert not all(model.settings["alone"] for model in models[0])  # then the primary would not matter
    for masked, plain in zip(*models, strict=True):
        assert masked.settings == plain.settings
        assert masked.tensors.keys() == plain.tensors.keys()
        for name, tensor in masked.tensors.items():
            np.testing.assert_array_equal(tensor, plain.tensors[name])


def test_a_seed_on_a_sites_disk_rounds_with_masks_as_without(tmp_path):
    """Whatever the cohort: its counts are in the masked terms' messages, and not in the seed."""
    terms, own = masked_terms(replace(FIXED, d_primary=24, landmarks="free")), draw_shard(70, 3)
    totals, secrets = [], []
    for way, agreed, sizes in (
        ("masked", terms, (60, 55)), ("other", terms, (50, 60)), ("plain", replace(terms, masked=False), (60, 55)),
    ):  # fmt: skip
        site = Site(tmp_path / way / "sites", "site-2", own, NAMES)
        site.write(terms, "rounding.seed", b"5" * 64)
        simulate([*masked_sites(tmp_path / way, sizes), site], agreed, tmp_path / way / "server")
        with Coordinator(tmp_path / way / "server") as server:
            totals.append(server.pool.running().vector.copy())
            others = sum(vectors(each, server.terms) for each in masked_sites(tmp_path / way, sizes))
            np.testing.assert_array_equal(totals[-1] - others, vectors(site, server.terms))
            secrets.append((vectors(site, server.terms), site.secret(server.terms, "ranges")))
    np.testing.assert_array_equal(totals[0], totals[2])
    for integers, _ in secrets:
        np.testing.assert_array_equal(integers, secrets[0][0])
    assert len({secret for _, secret in secrets}) == 3  # two cohorts cannot tell by it that a site is in both


def test_the_server_has_sums_and_nothing_of_a_single_site(tmp_path):
    sites, terms = masked_sites(tmp_path), masked_terms()
    heard = []
    with Coordinator(tmp_path / "server", terms) as server:
        federation = MaskedFederation(server, sites, overhear=lambda *each: heard.append(each))
        federation.run()
        settled, total, cohort = server.terms, server.pool.running().vector, federation.cohort
        statistics = Purpose("statistics"), 1, cohort.roster, settled, cohort.counts, server.pool.landmarks
        _, digits = round_of(*statistics)
    own = [vectors(site, settled) for site in sites]
    np.testing.assert_array_equal(total, sum(own))
    kinds = {what for what, *_ in heard}
    assert kinds == {"count", "spread", "statistics", "table"}
    with closing(sqlite3.connect(tmp_path / "server" / "ledger.sqlite")) as ledger:
        for table in ("descriptions", "spreads", "tables", "metrics"):
            assert ledger.execute(f"SELECT COUNT(*) FROM {table}").fetchone() == (0,)
        assert set(ledger.execute("SELECT n, form, blob FROM contributions")) == {(0, "masked", None)}
    kept = {path.name.split("-")[0] for path in (tmp_path / "server" / "blobs").iterdir()}
    assert kept == {"landmarks.safetensors", "sum", "cohort", "publication"}
    # A masked vector agrees with its own digits in as few bytes as chance does: one in 256.
    sent = {name: answer for what, phase, name, answer in heard if (what, phase) == ("statistics", "mask")}
    for site, vector in zip(sites, own, strict=True):
        plain = np.frombuffer(pack(words(digits.split(vector), digits.sum_bits), digits.sum_bits), np.uint8)
        masked = np.frombuffer(sent[site.name], np.uint8)[-len(plain) :]
        assert float(np.mean(plain == masked)) < 0.01  # of 24,000 bytes: chance gives 0.004, give or take 0.0004


def test_no_message_leaves_a_site_alone_and_the_server_takes_none(tmp_path):
    (site, *_), terms = masked_sites(tmp_path), masked_terms()
    plain = replace(terms, masked=False)
    described = Site(tmp_path / "other", "site-0", site.train, site.class_names).describe(plain.to_json().encode())
    with Coordinator(tmp_path / "server", terms) as server:
        for ask in (site.describe, site.spread, site.sent):
            with pytest.raises(InputError, match="only sums over several sites"):
                ask(server.invitation())
        assert server.describe(described, "site-0").outcome == "refused"
        assert "only sums are known" in status_of(tmp_path / "server")["refusals"][0]["reason"]
        for fix in (server.outline, server.settle):
            with pytest.raises(InputError, match="come from sums over a cohort"):
                fix()
        federation = MaskedFederation(server, masked_sites(tmp_path, (70, 60, 60)))
        federation.run()
        agreement, publication = server.settle(), server.deliver("site-0")
        site = federation.sites[0]
        for ask in (site.statistics, lambda given: site.table(given, publication), site.metrics):
            with pytest.raises(InputError, match="only sums over several sites"):
                ask(agreement)
        with pytest.raises(InputError, match="only sums over several sites"):
            site.rejoin(agreement, "")
        assert server.influence() == {}
    status = status_of(tmp_path / "server")
    console = Console(width=200, file=io.StringIO())
    console.print(status_view(status))
    shown = console.file.getvalue()
    assert "masked: the server sees sums only, so no site's rows, influence, table or accuracy" in shown
    assert "190 rows of 3 sites" in shown
    assert [row["n"] for row in status["clients"]] == [0, 0, 0]


def test_what_leaves_says_who_sees_what_in_one_screen(tmp_path):
    site, *_ = masked_sites(tmp_path)
    lines = site.what_leaves(masked_terms(min_cohort=4).to_json().encode()).lines()
    assert len(lines) <= 12
    assert "the server learns the sum over all sites that take part, at least 4" in lines[0]
    assert "nothing of this site but its name, its keys and that it takes part" in lines[0]
    assert any("into a sum, once: the sum of each of the 8 normalised features" in line for line in lines)
    assert any("other sites see the roster" in line for line in lines)
    assert lines[-1].startswith("never: rows")


# ------------------------------------------------------------------------------------------------------ dropouts


@st.composite
def absences(draw_):
    """For each sum, sites that stop answering it from some phase on: in each phase as many as may be missing."""
    n, found = len(SIZES), {}
    for what in ("count", "spread", "statistics", "table"):
        missing = draw_(st.lists(st.integers(0, n - 1), max_size=n - threshold(n), unique=True))
        found |= {(what, f"site-{k}"): draw_(st.sampled_from(PHASES)) for k in missing}
    return found


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(absences())
def test_whoever_drops_out_costs_its_own_contribution_only(drop):
    check_dropouts(drop)


def test_a_dropout_in_every_phase_costs_its_own_contribution_only():
    """One in each of the sums, before or after its masked vector."""
    check_dropouts({
        ("count", "site-0"): "share", ("spread", "site-1"): "mask", ("statistics", "site-2"): "mask",
        ("table", "site-3"): "unmask",
    })  # fmt: skip


@pytest.mark.slow
def test_a_dropout_after_the_masked_vector_is_in_the_sum():
    check_dropouts({("count", "site-4"): "confirm", ("statistics", "site-0"): "confirm", ("table", "site-1"): "mask"})


def check_dropouts(drop: dict[tuple[str, str], str]) -> None:
    """The sum is that of those who sent a masked vector, the landmarks are drawn from theirs, and all get a model."""

    def answers(what: str, phase: str, name: str) -> bool:
        return PHASES.index(phase) < PHASES.index(drop.get((what, name), "unmask")) or (what, name) not in drop

    def inside(what: str) -> list[str]:
        return [f"site-{k}" for k in range(len(SIZES)) if drop.get((what, f"site-{k}")) not in SENDING]

    with TemporaryDirectory() as folder:
        sites = {site.name: site for site in masked_sites(Path(folder))}
        with Coordinator(Path(folder) / "server", masked_terms()) as server:
            federation = MaskedFederation(server, list(sites.values()), answers=answers)
            models = federation.run()
            settled, outline = server.terms, Terms.from_json(server.outline())
            assert list(server.pool.members()) == inside("statistics")
            expected = sum(vectors(sites[name], settled) for name in inside("statistics"))
            np.testing.assert_array_equal(server.pool.running().vector, expected)
            spreads = [open_spread(sites[name].own_spread(outline), outline).integers for name in inside("spread")]
            assert draw(outline, spreads)[1] == server.landmarks()
            counted = federation.cohort.counts
            assert sum(counted.rows) == sum(len(sites[name].train) for name in inside("count"))
            told = {name: open_publication(server.deliver(name), settled) for name in sites}
            left_out = [sites[name].left_out(settled, 1, server.deliver(name)) for name in inside("table")]
            (table,) = summed(server.ledger, "table", 1).values()
            assert table == [*sum(hits for hits, _ in left_out).reshape(-1).tolist(), sum(n for _, n in left_out)]
        for path, name in zip(models, sites, strict=True):
            assert read(path).settings["publication"] == 1
            member = sites[name]._is_member(settled, told[name])
            assert member == (name in inside("statistics"))


def test_below_the_threshold_nothing_is_revealed_and_the_error_says_so(tmp_path):
    """Three of five are left from some phase on, and four are needed; a later round with all of them succeeds."""
    with Coordinator(tmp_path / "server", masked_terms(FIXED)) as server:
        federation = MaskedFederation(server, masked_sites(tmp_path))
        for from_phase in PHASES:

            def answers(what: str, phase: str, name: str, first: str = from_phase) -> bool:
                return PHASES.index(phase) < PHASES.index(first) or name not in ("site-1", "site-3")

            federation.answers = answers
            with pytest.raises(InputError, match=r"\b3 .* 4 are needed.*(nothing is unmasked|the sum stays masked)"):
                federation.sum_of(Purpose("count"))
            assert federation.cohort.counts is None
        federation.answers = lambda *each: True
        federation.sum_up()
        assert server.publish().n_samples == sum(SIZES)


def test_a_server_that_is_killed_between_sums_goes_on_and_asks_for_none_twice(tmp_path):
    sites, terms, heard = masked_sites(tmp_path, (70, 60, 60)), masked_terms(), []
    with Coordinator(tmp_path / "server", terms) as server:
        members = MaskedFederation(server, sites).members
    while True:
        with Coordinator(tmp_path / "server") as server:
            federation = MaskedFederation(server, sites, members, overhear=lambda *each: heard.append(each[:3]))
            purpose = federation.cohort.owed()
            if purpose is None and server.current() is not None:
                break
            if purpose is None:
                server.publish()
            else:
                federation.sum_of(purpose)
    assert len(heard) == len(set(heard)) == len(sites) * len(PHASES) * 4
    with Coordinator(tmp_path / "server") as server:
        expected = sum(vectors(site, server.terms) for site in sites)
        np.testing.assert_array_equal(server.pool.running().vector, expected)


# ------------------------------------------------------------------------------------- what a site does not unmask


def refused_without_one(federation: MaskedFederation, what: str) -> None:
    federation.answers = lambda what, phase, name: name != "site-2"
    with pytest.raises(InputError, match="the difference would tell a single site"):
        federation.sum_of(Purpose(what))


def test_a_site_unmasks_one_sum_for_each_purpose(tmp_path):
    """Of a second sum over other members the difference would be a site; over the same members it is no news."""
    with Coordinator(tmp_path / "server", masked_terms(FIXED)) as server:
        federation = MaskedFederation(server, masked_sites(tmp_path))
        first = federation.sum_of(Purpose("count"))
        assert federation.sum_of(Purpose("count")) == first
        refused_without_one(federation, "count")


def test_made_up_counts_bring_no_second_sum(tmp_path):
    """A site cannot check the counts, so they do not make another purpose of a sum that it has unmasked."""
    with Coordinator(tmp_path / "server", masked_terms(FIXED)) as server:
        federation = MaskedFederation(server, masked_sites(tmp_path))
        federation.sum_up()
        counts = federation.cohort.counts
        made_up = replace(counts, rows=(counts.rows[0] + 1, *counts.rows[1:])).to_bytes().decode()
        server.ledger.put(f"counts {counts.roster}", made_up)
        refused_without_one(federation, "statistics")


def test_other_landmarks_bring_no_second_sum(tmp_path, monkeypatch):
    """With the last landmark changed, all other columns of two sums would be the same."""
    sites = masked_sites(tmp_path)
    with Coordinator(tmp_path / "server", masked_terms(FIXED)) as server:
        federation = MaskedFederation(server, sites)
        federation.sum_up()
        found = server.pool.landmarks
        points = found.feature_map.points.clone()
        points[-1, 0] += 1 if points[-1, 0] < 127 else -1
        other = Landmarks(replace(found.feature_map, points=points), found.mean_squares)
        data, fingerprint = seal_landmarks("f", other), other.feature_map.fingerprint
        terms = replace(server.terms, fingerprints=(fingerprint, fingerprint), landmarks_sha256=sha256(data))
        for site in sites:
            site.keep_landmarks(terms.to_json().encode(), data)
        monkeypatch.setattr(Coordinator, "agreed", property(lambda self: terms))
        monkeypatch.setattr(server.pool, "landmarks", other)
        refused_without_one(federation, "statistics")


def test_sites_that_are_told_other_terms_do_not_mask_together(tmp_path):
    """The purpose of a round has the digest of the terms: one that was made under others is refused."""
    sites = masked_sites(tmp_path)
    with Coordinator(tmp_path / "server", masked_terms(FIXED)) as server:
        federation = MaskedFederation(server, sites)
        round_ = federation.cohort.begin(Purpose("count"))
        question = round_.aggregator.questions()["site-0"]
        other = masked_terms(FIXED, seed=5).to_json().encode()
        with pytest.raises(InputError, match="a round with another purpose"):
            federation.masked["site-0"].answer("advertise", question, other)
        plain = replace(masked_terms(FIXED), masked=False).to_json().encode()
        with pytest.raises(InputError, match="terms without masks"):
            federation.masked["site-1"].answer("advertise", question, plain)
        with pytest.raises(InputError, match="phase 'vote'"):
            federation.masked["site-1"].answer("vote", question, server.invitation())


def test_rounds_that_are_not_as_the_terms_say_are_refused(tmp_path):
    with Coordinator(tmp_path / "server", masked_terms(FIXED)) as server:
        federation = MaskedFederation(server, masked_sites(tmp_path))
        site, agreement = federation.masked["site-0"], server.invitation()
        round_ = federation.cohort.begin(Purpose("count")).aggregator.round_
        for field, value in {"length": 5, "bits": 9, "federation": "g", "purpose": "count 1 x"}.items():
            with pytest.raises(InputError, match=rf"another {field}"):
                site.answer("advertise", replace(round_, **{field: value}).to_bytes(), agreement)
        for purpose in ("tally 0 x", "count x", "count"):
            with pytest.raises(InputError, match="which is none of"):
                site.answer("advertise", replace(round_, purpose=purpose).to_bytes(), agreement)
        told = Purpose("statistics").text(server.draft, None)
        with pytest.raises(InputError, match="without the counts"):
            site.answer("advertise", replace(round_, purpose=told).to_bytes(), agreement)
        with pytest.raises(InputError, match="in no round"):
            site.answer("mask", b"", agreement)


def test_a_site_reads_questions_that_were_changed_or_refuses_them_in_words(tmp_path):
    """One byte of each question of a round, changed at every fifth place; what is still read is counted."""
    read_anyway, refused = Counter(), Counter()
    with Coordinator(tmp_path / "server", masked_terms(FIXED)) as server:
        federation = MaskedFederation(server, masked_sites(tmp_path, (70, 60, 60)))
        site, agreement = federation.masked["site-0"], server.invitation()
        aggregator = federation.cohort.begin(Purpose("count")).aggregator
        questions = aggregator.questions()
        for phase in PHASES:
            state, question = site.member.state, questions["site-0"]
            for place in range(0, len(question), 5):
                changed = bytearray(question)
                changed[place] ^= 1
                copy = Member("site-0", site.member.identity, site.member.roster, federation="f", state=state)
                try:
                    MaskedSite(site.site, copy).answer(phase, bytes(changed), agreement)
                    read_anyway[phase] += 1
                except InputError:
                    refused[phase] += 1
            for name, each in questions.items():
                aggregator.receive(name, federation.masked[name].answer(phase, each, agreement))
            questions = aggregator.close()
    # Another number of the round is another round; encrypted shares are opened later.
    assert set(read_anyway) <= {"advertise", "mask"}
    assert 1 <= read_anyway["advertise"] <= 4
    assert all(refused[phase] >= 10 for phase in PHASES)
