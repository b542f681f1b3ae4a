"""The pilot that chooses the normalisation between machines: it is that of the method, and nothing else gets in."""

from __future__ import annotations

import json
import sqlite3
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

from apfl import load_model
from apfl.data.federation import Shard
from apfl.errors import InputError
from apfl.federate import Coordinator, Site, Terms, status_of
from apfl.federate.blobs import FolderError
from apfl.federate.contribution import largest_answer
from apfl.federate.inprocess import simulate
from apfl.federate.messages import open_description
from apfl.federate.pilot import open_primaries, open_question, open_statistics
from apfl.federate.roll import Enrolled, digest_of
from apfl.federate.wire import sha256
from apfl.maths.pilot import CANDIDATES, judge
from apfl.methods._streams import own_seed
from apfl.methods.apfl import APFL
from tests.federate.federation_toys import NAMES, PILOT, contribute, keep_the_primary, make_sites
from tests.federate.test_deploy_refusals import Message, header

TWO = ("short", "long")


def told_by_length(n: int, seed: int) -> Shard:
    """Signed features, 40 of them, whose length alone says the class: the rule of the moments says 'row'."""
    rng = np.random.default_rng(seed)
    labels = np.concatenate([[0, 0, 1, 1], rng.integers(2, size=n - 4)])
    features = rng.normal(size=(n, 40)) * (1 + labels[:, None])
    return Shard(torch.from_numpy(features), torch.from_numpy(labels), torch.arange(n) // 2 if seed % 2 else None)


def sites_of(folder: Path, seed: int, sizes: tuple[int, ...]) -> list[Site]:
    """Sites that round, and draw the rows of the pilot, as the method's clients do."""
    return [
        Site(folder / "sites", f"site-{k}", told_by_length(n, k), TWO, rounding_seed=own_seed(seed, k))
        for k, n in enumerate(sizes)
    ]


# ------------------------------------------------------------------------------------------- that of the method


@pytest.mark.parametrize(
    ("method", "sizes", "most_rows"),
    [
        (PILOT, (60, 50, 70), 10_000),
        (replace(PILOT, landmarks="free", gamma=1.0), (60, 90), 10_000),
        (replace(PILOT, bits="auto"), (70, 180), 120),
    ],
    ids=["federation", "free", "some rows"],
)
def test_choice_models_and_bytes_are_those_of_the_method(tmp_path, monkeypatch, method, sizes, most_rows):
    keep_the_primary(monkeypatch)
    monkeypatch.setattr("apfl.maths.pilot.MOST_ROWS", most_rows)
    sites = sites_of(tmp_path, 3, sizes)
    made = simulate(sites, Terms("f", method=method, seed=3, class_names=TWO), tmp_path / "server")
    (last,) = method.rounds([site.train for site in sites], 2, 3)
    state = status_of(tmp_path / "server")
    chosen = state["terms"]["method"]["normalise"]
    assert state["pilot"] == {"normalise": last.chosen["normalise"], **last.chosen["pilot"]}
    assert chosen == last.chosen["normalise"] != state["pilot"]["usual"] == "row"
    assert state["terms"]["pilot"] == [[how, hits] for how, hits in last.chosen["pilot"]["hits"].items()]
    assert (last.bytes_up, last.bytes_down) == (made.payload_up, made.payload_down)
    assert state["bytes_up"] == made.bytes_up
    test = told_by_length(50, 99).features
    for path, model in zip(made.models, last.models, strict=True):
        torch.testing.assert_close(load_model(path).scores(test), model.scores(test), rtol=0, atol=1e-9)


def test_primaries_are_ridges_of_the_rows_on_maps_that_a_site_draws_by_itself(tmp_path):
    """By another route: rows mapped and added here, unrounded; the integers change a primary by little."""
    trial, question, sites, statistics, primaries = under_way()
    asked = open_question(question, trial)
    told = open_primaries(primaries, asked)
    for how, each in asked.candidates.items():
        phi = torch.cat([each.phi(site.train.features) for site in sites])
        y = torch.nn.functional.one_hot(torch.cat([site.train.labels for site in sites]), 3).double()
        gamma = told.gammas[how]
        exact = torch.linalg.solve(phi.T @ phi + gamma * torch.eye(phi.shape[1]), phi.T @ y)
        scores, expected = phi @ told.shared[how].weights, phi @ exact
        # Twelve bits a product: the scores of 175 rows differ by a small part of how far they spread.
        assert float((scores - expected).norm() / (expected - expected.mean()).norm()) < 0.02
        assert told.units[how] == pytest.approx(float(phi.square().sum(1).mean()), rel=1e-3)  # rounded sums
    assert told.members == Enrolled(**digest_of(sha256(data) for data in statistics))
    assert sha256(statistics[0]) not in told.members  # nobody's proof came along


@pytest.mark.parametrize("kind", ["random", "landmarks"])
def test_terms_may_state_the_normalisation_of_centred_roots(tmp_path, kind):
    method = APFL(d_primary=40, map=kind, bits=16 if kind == "landmarks" else 0, normalise="centred", sketch=16)
    sites = make_sites(tmp_path)
    simulate(sites, Terms("f", method=method, seed=3), tmp_path / "server")
    terms = Terms.from_json((sites[0].home(Terms("f")) / "settled.json").read_bytes())
    features = torch.cat([site.train.features for site in sites])
    root = features.sign() * features.abs().sqrt()
    root = root * (8**0.5 / root.norm(dim=1, keepdim=True))
    torch.testing.assert_close(torch.tensor(terms.mean, dtype=torch.float64), root.mean(0))


def test_a_row_that_drowns_others_rules_a_candidate_out_for_everyone(tmp_path):
    sites = sites_of(tmp_path, 0, (60, 60))
    sites[1].train.features[3] = 1e12
    with Coordinator(tmp_path / "server", Terms("f", method=PILOT)) as server:
        contribute(server, sites)
        assert set(status_of(tmp_path / "server")["pilot"]["hits"]) == {"root", "row", "centred"}


def test_one_liar_does_not_decide():
    """Twelve sites of 100 rows see a difference of 22 rows; one of 1,000 says that all its rows differ."""
    honest, liar = (torch.tensor(hits)[:, None, None, None] for hits in ([80, 81, 59], [0, 0, 1000]))
    told = judge(["root", "row", "columns"], [*[honest] * 12, liar], [100] * 12 + [1000], "root")
    assert told.normalise == "root"
    assert told.hits == {"root": 12 * 80 + 780, "row": 12 * 81 + 780, "columns": 12 * 59 + 1000}
    assert judge(["root", "row", "columns"], [honest, liar], [100, 1000], "root").normalise == "columns"


# ------------------------------------------------------------------------------------------------ who comes and goes


def begin(server: Coordinator, sites: list[Site]) -> tuple[bytes, bytes]:
    for site in sites:
        assert server.describe(site.describe(server.invitation()), site.name).ok
    return server.trial(), server.pilot_question()


def test_restarts_duplicates_and_quorums(tmp_path):
    sites, terms = make_sites(tmp_path), Terms("f", method=PILOT, quorum=3)
    with Coordinator(tmp_path / "server", terms) as server:
        with pytest.raises(InputError, match="0 clients have described"):
            server.trial()
        trial, question = begin(server, sites)
        assert server.piloting == "statistics"
        with pytest.raises(InputError, match="0 clients have sent the statistics of the pilot"):
            server.pilot_primaries()
        with pytest.raises(InputError, match="0 clients have sent the tables"):
            server.outline()
        sent = sites[0].pilot(trial, question)
        assert server.pilot_statistics(sent, "site-0").outcome == "accepted"
        assert server.pilot_statistics(sent, "site-0").outcome == "duplicate"
        assert server.pilot_statistics(sent, "site-1").reason.startswith("a message of client 'site-0'")
    with Coordinator(tmp_path / "server") as server:
        assert (server.trial(), server.pilot_question(), server.piloting) == (trial, question, "statistics")
        again = Site(sites[0].folder, "site-0", sites[0].train, NAMES)
        assert again.pilot(trial, question) == sent
        for site in sites[1:3]:
            assert server.pilot_statistics(site.pilot(trial, question), site.name).ok
        primaries = server.pilot_primaries()
        late = server.pilot_statistics(sites[3].pilot(trial, question), "site-3")
        assert (late.outcome, "too late" in late.reason) == ("refused", True)
        with pytest.raises(InputError, match="without this site's statistics"):
            sites[3].pilot_table(trial, server.pilot_primaries("site-3"))
        with pytest.raises(InputError, match="without this site's statistics"):
            sites[3].pilot_table(trial, server.pilot_primaries("site-0"))  # another's proof
    with Coordinator(tmp_path / "server") as server:
        assert (server.pilot_primaries(), server.piloting) == (primaries, "tables")
        for site in sites[:3]:
            assert server.pilot_table(site.pilot_table(trial, server.pilot_primaries(site.name)), site.name).ok
        table = sites[0].pilot_table(trial, server.pilot_primaries("site-0"))
        assert server.pilot_table(table, "site-0").outcome == "duplicate"
        server.outline()
        assert server.piloting == ""
        assert server.pilot_table(table, "site-0").outcome == "refused"
        assert {row["data"] for row in server.ledger.pilots("statistics")} == {b""}
        assert not list((tmp_path / "server" / "blobs").iterdir())
    for path in (tmp_path / "server").rglob("*"):  # nobody's statistics are kept
        assert not path.is_file() or sent[-64:] not in path.read_bytes()


@pytest.mark.parametrize(("stage", "gone"), [("statistics", "leave"), ("tables", "forget")])
def test_who_leaves_during_the_pilot_has_no_part_in_it(tmp_path, stage, gone):
    sites, terms = make_sites(tmp_path, (12, 20, 10, 16)), Terms("f", method=PILOT, class_names=NAMES)
    others = [*sites[:1], *sites[2:]]
    with Coordinator(tmp_path / "server", terms) as server:
        trial, question = begin(server, sites)
        for site in sites:
            server.pilot_statistics(site.pilot(trial, question), site.name)
        if stage == "tables":
            server.pilot_table(sites[0].pilot_table(trial, server.pilot_primaries("site-0")), "site-0")
        assert not getattr(server, gone)("site-1").remains
        assert server.piloting == ""
        assert not list((tmp_path / "server" / "blobs").iterdir())
        assert (server.trial(), server.pilot_question()) != (trial, question)
        contribute(server, others)
        ended = server.status()["pilot"]
    with Coordinator(tmp_path / "without", terms) as server:
        begin(server, others)
        contribute(server, others)
        assert server.status()["pilot"] == ended
        evidence = server.leave("site-0")
    assert any("left-out hits of the pilot" in each for each in evidence.remains)
    if gone == "forget":
        assert not [p for p in (tmp_path / "server").rglob("*") if p.is_file() and b"site-1" in p.read_bytes()]


def test_a_folder_of_before_there_were_pilots_opens_and_a_changed_one_does_not(tmp_path):
    sites = make_sites(tmp_path)
    for change in (False, True):
        folder = tmp_path / str(change)
        with Coordinator(folder, Terms("f", method=replace(PILOT, normalise="row"))) as server:
            contribute(server, sites)
            with server.ledger.transaction():
                server.ledger.db.execute("DROP TABLE pilots")
        if change:
            with sqlite3.connect(folder / "ledger.sqlite") as db:
                db.execute("UPDATE contributions SET n = 7 WHERE client = 'site-0'")
            db.close()
            with pytest.raises(FolderError, match="changed on disk"):
                Coordinator(folder)
        else:
            assert status_of(folder)["phase"] == "contributing"
            with Coordinator(folder) as server:
                server.publish()


# --------------------------------------------------------------------------------------------------- what is refused


@cache
def under_way() -> tuple[Terms, bytes, list[Site], list[bytes], bytes]:
    """A pilot with its primaries out: terms of the trial, question, sites, their statistics, primaries."""
    folder = Path(mkdtemp())
    sites = make_sites(folder)
    with Coordinator(folder / "server", Terms("f", method=PILOT, class_names=NAMES)) as server:
        trial, question = begin(server, sites)
        sent = [site.pilot(trial, question) for site in sites]
        for site, data in zip(sites, sent, strict=True):
            assert server.pilot_statistics(data, site.name).ok
        return Terms.from_json(trial), question, sites, sent, server.pilot_primaries()


Change = Callable[[Message], object]


def repacked(how: str, part: str, change: Callable[[np.ndarray], object]) -> Change:
    """Other integers of one candidate."""

    def changed(message: Message) -> None:
        trial, question, _, sent, _ = under_way()
        asked = open_question(question, trial)
        encoding = asked.encoding(how)
        vector = open_statistics(sent[1], asked).integers[how].copy()
        own = vector[encoding.layout.places[part]]
        own[:] = change(own)
        how_packed = encoding.packing(torch.from_numpy(vector))
        message.tensors[how] = torch.from_numpy(how_packed.pack(vector).copy())
        message.header["packed"][how] = {"bits": list(how_packed.bits), "escaped": list(how_packed.escaped)}

    return changed


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (header("n", 69), "n contradicts itself: 69 rows in the header, 70 in the message"),
        (header("terms", "0" * 64), "other terms"),
        (header("pilot", "0" * 64), "another pilot"),
        (header("saturated", -1), "saturated"),
        (header("packed", 3), "must say how they are packed"),
        (header("packed", {"root": {}}), "must say how they are packed"),
        (lambda m: m.tensors.pop("row"), "must hold"),
        (lambda m: m.tensors.update(root=m.tensors["root"][:-1]), "must be U8"),
        (repacked("row", "class_counts", lambda own: np.roll(own, 1)), "differ between normalisations"),
        (repacked("root", "echo", lambda own: own + 1), "no place there"),
        (repacked("columns", "diagonal", lambda own: 2 * own), "n contradicts the matrix: trace"),
        (repacked("centred", "below", lambda own: own[::-1].copy() * 9 % 2000), "indefinite|trace"),
        (repacked("root", "cross", lambda own: own * 2), "too long"),
    ],
)
def test_statistics_that_no_rows_have_are_refused(change, reason):
    trial, question, _, sent, _ = under_way()
    message = Message.of(sent[1])
    change(message)
    with pytest.raises(InputError, match=reason):
        open_statistics(message.sealed(), open_question(question, trial))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (header("terms", "0" * 64), "other terms"),
        (header("tried", ["row", "root"]), "must list normalisations"),
        (header("tried", ["row", "cubes"]), "must list normalisations"),
        (header("usual", "cubes"), "must list normalisations"),
        (header("fingerprints", []), "must list normalisations"),
        (header("fingerprints", ["0" * 64] * 4), "come out differently here"),
        (header("n", 2**40), "contradicts itself"),
        (header("n", 1), "contradicts itself"),
        (header("described", 7), "must be U8"),
        (lambda m: m.tensors["row_sums"].fill_(float("nan")), "row_sums contains NaN"),
        (lambda m: m.tensors["root_sums"].add_(9.0), "come out differently here"),
        (lambda m: m.tensors["root_kept"].zero_(), "without landmarks for root"),
        (lambda m: m.tensors["root_kept"][3].zero_(), "come out differently here"),
        (lambda m: m.tensors.update(more=torch.zeros(3)), "must hold"),
    ],
)
def test_other_questions_are_refused_by_a_site(change, reason):
    trial, question, *_ = under_way()
    message = Message.of(question)
    change(message)
    with pytest.raises(InputError, match=reason):
        open_question(message.sealed(), trial)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (header("pilot", "0" * 64), "another pilot"),
        (header("units", {"root": 1.0}), "finite number"),
        (header("units", dict.fromkeys(CANDIDATES, -1.0)), "must be positive"),
        (header("gammas", 3), "must list"),
        (header("members", "all"), "must list"),
        (lambda m: m.tensors["row_weights_scale"].fill_(float("inf")), "NaN or infinity"),
        (lambda m: m.tensors.update(row_weights=m.tensors["row_weights"][:, :2].clone()), "must be I16"),
    ],
)
def test_other_primaries_are_refused_by_a_site(change, reason):
    trial, question, _, _, primaries = under_way()
    message = Message.of(primaries)
    change(message)
    with pytest.raises(InputError, match=reason):
        open_primaries(message.sealed(), open_question(question, trial))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.tensors["hits"][0, 0, 0, 0].fill_(71), "outside 0 to 70"),
        (lambda m: m.tensors["hits"][3, 0, 0, 0].fill_(-1), "outside 0 to 70"),
        (header("primaries", "0" * 64), "not behind these primaries"),
        (lambda m: m.tensors.update(hits=m.tensors["hits"][:3].clone()), "must be I64"),
        (header("client", "site-9"), "sent by"),
    ],
)
def test_tables_of_no_rows_are_refused(tmp_path, change, reason):
    sites = make_sites(tmp_path)
    with Coordinator(tmp_path / "server", Terms("f", method=PILOT, class_names=NAMES)) as server:
        trial, question = begin(server, sites)
        for site in sites:
            server.pilot_statistics(site.pilot(trial, question), site.name)
        message = Message.of(sites[1].pilot_table(trial, server.pilot_primaries("site-1")))
        change(message)
        receipt = server.pilot_table(message.sealed(), "site-1")
        assert receipt.outcome == "refused"
        assert reason in receipt.reason
        assert not server.ledger.pilot_hashes("table")


@settings(max_examples=25, deadline=None)  # each reads a message or refuses it
@given(st.integers(0, 2**31), st.integers(1, 255))
def test_changed_bytes_are_refused_or_say_something_that_rows_can_have(place, flip):
    trial, question, _, sent, _ = under_way()
    asked = open_question(question, trial)
    changed = bytearray(sent[1])
    changed[place % len(changed)] ^= flip
    try:
        told = open_statistics(bytes(changed), asked)
    except (InputError, UnicodeDecodeError):
        return
    assert told.n_samples <= asked.most_rows


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m: m.tensors["row_squares"].mul_(1.1), "rows of one length do not have"),
        (lambda m: m.tensors["root_squares"].mul_(0), "below the squares of the sums"),
        (lambda m: m.tensors["row_sums"].fill_(float("nan")), "not finite"),
        (lambda m: m.tensors.pop("row_sums"), "must hold"),
        (header("unsuited", ["cubes"]), "allowed are root"),
        (header("unsuited", "columns"), "allowed are root"),
    ],
)
def test_descriptions_with_moments_that_no_rows_have_are_refused(tmp_path, change, reason):
    draft = Terms("f", method=PILOT)
    message = Message.of(make_sites(tmp_path)[1].describe(draft.to_json().encode()))
    assert open_description(message.sealed(), draft).described is not None
    change(message)
    with pytest.raises(InputError, match=reason):
        open_description(message.sealed(), draft)


def test_a_site_tries_nothing_that_its_invitation_did_not_say(tmp_path):
    site, *_ = sites = make_sites(tmp_path)
    given = Terms("f", method=replace(PILOT, normalise="row"))
    with (
        Coordinator(tmp_path / "server", Terms("f", method=PILOT)) as server,
        Coordinator(tmp_path / "other", given) as stated,
    ):
        trial, question = begin(server, sites)
        other = replace(Terms.from_json(trial), min_per_class=1).to_json().encode()
        with pytest.raises(InputError, match="min_per_class has changed"):
            site.pilot(other, question)
        with pytest.raises(InputError, match="try no normalisation"):
            site.pilot(server.invitation(), question)
        with pytest.raises(InputError, match="asked for no statistics"):
            site.pilot_table(trial, b"")
        with pytest.raises(InputError, match="state the normalisation"):
            stated.trial()
        assert len(site.pilot(trial, question)) < largest_answer(Terms.from_json(trial))


def test_a_class_of_few_rows_in_the_pilot_is_withheld_from_it(tmp_path, monkeypatch):
    """A share of the rows may leave one row of a class, whose sum would be that row."""
    monkeypatch.setattr("apfl.maths.pilot.MOST_ROWS", 60)
    sites = make_sites(tmp_path, (100, 90))
    sites[0].train.labels[:] = torch.cat([torch.arange(98) % 2, torch.tensor([2, 2])])
    with Coordinator(tmp_path / "server", Terms("f", method=PILOT, min_per_class=2)) as server:
        trial, question = begin(server, sites)
        asked = open_question(question, Terms.from_json(trial))
        counted = []
        for seed in range(8):
            sites[0].rounding_seed = seed
            own = sites[0]._rows_of_pilot(asked)
            counted.append(torch.bincount(own.labels, minlength=3).tolist()[2])
            assert len(own) <= asked.most_rows == 32
    assert set(counted) <= {0, 2}
    assert 0 in counted


def test_status_and_terms_say_what_was_chosen(tmp_path):
    sites = make_sites(tmp_path)
    with Coordinator(tmp_path / "server", Terms("f", method=PILOT)) as server:
        begin(server, sites)
        state = status_of(tmp_path / "server")
        assert (state["phase"], state["pilot"]) == ("piloting", None)
        contribute(server, sites)
        terms = server.terms
        assert dict(terms.pilot) == status_of(tmp_path / "server")["pilot"]["hits"]
        assert Terms.from_json(terms.to_json()) == terms
        what = [event["what"] for event in server.ledger.events(40)]
        assert [each for each in what if each in ("piloting", "tried", "piloted", "outlined")][::-1] == [
            "piloting", "tried", "piloted", "outlined",
        ]  # fmt: skip
    assert "pilot" not in json.loads(Terms("f", method=PILOT).to_json())
