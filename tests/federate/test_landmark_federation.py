"""A federation of landmarks and integers through the bytes that travel: the laws that those of random maps obey."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from apfl import load_model
from apfl.data.federation import Shard
from apfl.errors import InputError
from apfl.federate import Coordinator, Site, Terms, status_of
from apfl.federate.contribution import decode
from apfl.federate.inprocess import simulate
from apfl.federate.landmarks import Landmarks, draw, load_landmarks, open_landmarks, open_spread, seal_landmarks
from apfl.federate.primary import primary_model
from apfl.federate.status import summary
from apfl.federate.sums import IntegerSum
from apfl.federate.wire import sha256
from apfl.maths.dither import dither
from apfl.maths.integers import Encoding, Rounding
from apfl.maths.landmarks import LandmarkMap
from apfl.maths.ridge import one_hot, statistics
from apfl.methods._streams import own_seed
from apfl.methods.apfl import APFL
from apfl.models.file import read
from apfl.models.landmark import LandmarkModel
from tests.federate.federation_toys import (
    FIXED,
    LANDMARKS,
    NAMES,
    contribute,
    describe,
    draw_shard,
    keep_the_primary,
    make_sites,
    same,
    seeded,
    seen,
    tabulate,
)

AGREED = {"gamma": 1.0, "beta": 1.0, "balance": 0.5, "tau": 0.0}


def in_double(folder: Path, seed: int = 0, sizes: tuple[int, ...] = (30, 70, 20, 55)) -> list[Site]:
    """Sites that round as the method's clients do, with rows in double precision: the order of sums changes less then
    than a hit or an integer takes."""
    sites = seeded(folder, seed, sizes)
    for site in sites:
        site.train = replace(site.train, features=site.train.features.double())
    return sites


# -------------------------------------------------------------------------------------------- what comes out


@pytest.mark.parametrize(
    ("method", "sizes"),
    [
        (LANDMARKS, (30, 70, 20, 55)),
        (replace(LANDMARKS, landmarks="free", normalise="row", bits=12, balance=0.2), (60, 90, 50, 80)),
        (replace(LANDMARKS, normalise="columns", **AGREED), (6, 7)),  # fewer than four rows for each column
        (replace(LANDMARKS, scope="client", sketch=16), (6, 90)),
        (APFL(map="landmarks", bits=32, sketch=16, tau=0.05, normalise="columns"), (30, 300)),
    ],
    ids=lambda value: str(value) if isinstance(value, tuple) else f"{value.landmarks}-{value.bits}-{value.scope}",
)
def test_personal_models_and_bytes_are_those_of_the_method(tmp_path, method, sizes, monkeypatch):
    """With the same seeds of rounding: sums of integers know no order."""
    keep_the_primary(monkeypatch)
    sites = in_double(tmp_path, 3, sizes)
    made = simulate(sites, Terms("f", method=method, seed=3), tmp_path / "server")
    *_, last = method.rounds([site.train for site in sites], 3, 3)
    test = sites[0].test.features
    for path, model in zip(made.models, last.models, strict=True):
        own = load_model(path)
        assert isinstance(own, LandmarkModel)
        assert torch.equal(own.feature_map.points, model.feature_map.points)
        torch.testing.assert_close(own.scores(test), model.scores(test), rtol=0, atol=1e-9)
        assert not read(path).settings["alone"]
    assert (last.bytes_up, last.bytes_down) == (made.payload_up, made.payload_down)
    assert status_of(tmp_path / "server")["bytes_up"] == made.bytes_up


def test_accuracy_on_digits_is_that_of_the_method_within_rounding(tmp_path):
    digits, rng = load_digits(), np.random.default_rng(0)
    order, names = rng.permutation(1797), tuple(map(str, range(10)))
    features, labels = torch.from_numpy(digits.data[order]).float(), torch.from_numpy(digits.target[order]).long()
    parts = np.array_split(np.arange(1797), 5)
    method = APFL(map="landmarks", bits=16, d_primary=256)
    sites = [
        Site(tmp_path / "sites", f"site-{k}", Shard(features[p[:250]], labels[p[:250]]), names,
             Shard(features[p[250:]], labels[p[250:]]))
        for k, p in enumerate(parts)
    ]  # fmt: skip
    simulate(sites, Terms("f", method=method), tmp_path / "server")
    *_, last = method.rounds([site.train for site in sites], 10, 0)
    agreement = (sites[0].home(Terms("f")) / "settled.json").read_bytes()
    own = [site.evaluate(agreement)["accuracy"] for site in sites]
    expected = [
        float((model.scores(site.test.features).argmax(1) == site.test.labels).float().mean())
        for model, site in zip(last.models, sites, strict=True)
    ]
    # The sites drew their own seeds, so that a row at the edge may go either way: four of 547 rows.
    assert np.mean(own) == pytest.approx(np.mean(expected), abs=4 / 547)
    assert np.mean(own) > 0.97


def test_the_primary_is_the_ridge_of_the_rounded_sums(tmp_path):
    """By another route: every site's statistics are rounded here, and added as floating-point numbers."""
    sites = in_double(tmp_path)
    with Coordinator(tmp_path / "server", Terms("f", method=replace(LANDMARKS, **AGREED))) as server:
        contribute(server, sites)
        weights, terms = seen(server.publish(), server.terms).weights, server.terms
        landmarks = load_landmarks(server.ledger, terms)
    matrix, cross = torch.eye(40, dtype=torch.float64), torch.zeros(40, 3, dtype=torch.float64)
    exact = matrix.clone()
    for k, site in enumerate(sites):
        phi = landmarks.feature_map(terms.normaliser()(site.train.features))
        encoding = Encoding(Rounding.for_rows(16, 70), landmarks.mean_squares, 3, landmarks.feature_map.basis)
        own = statistics(phi, one_hot(site.train.labels, 3))
        told = encoding.decode(encoding.encode(own, dither(own_seed(0, k), "statistics", torch.device("cpu")))[0])
        matrix, cross, exact = matrix + told.autocorrelation, cross + told.crosscorrelation, exact + own.autocorrelation
    expected = torch.linalg.solve(matrix, cross)
    # Published in 16 bits, half a step of which is the largest entry of a column over 65534.
    assert float(((weights - expected).abs() / expected.abs().amax(0)).max()) <= 1.001 / 65534
    assert not torch.equal(matrix, exact)


# ---------------------------------------------------------------------------- who comes, goes and comes late


@settings(max_examples=5)  # each writes a folder
@given(st.permutations(range(4)), st.lists(st.booleans(), min_size=4, max_size=4), st.booleans())
def test_order_and_grouping_do_not_matter(order, restarts, keep):
    """Bit for bit, with publications and restarts anywhere in between."""
    terms = Terms("f", method=LANDMARKS, quorum=1, class_names=NAMES, keep_contributions=keep)
    with TemporaryDirectory() as folder:
        sites = make_sites(Path(folder))
        server = Coordinator(Path(folder) / "server", terms)
        agreement = describe(server, sites)
        sent = {site.name: site.statistics(agreement) for site in sites}
        for k, restart in zip(order, restarts, strict=True):
            assert server.accept(sent[f"site-{k}"], f"site-{k}").ok
            if restart:
                server.publish()
                server.close()
                server = Coordinator(Path(folder) / "server", terms)
        summed = server.publish() and server.pool.running()
        server.close()
        assert isinstance(summed, IntegerSum)
        assert np.array_equal(summed.vector, sum(decode(data, server.terms).integers for data in sent.values()))


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("gone", ["leave", "forget"])
def test_a_client_that_left_leaves_no_trace(tmp_path, keep, gone):
    """But for the landmarks and the step, which the evidence names: the others' sum is what it would have been."""
    sites = make_sites(tmp_path)
    terms = Terms("f", method=LANDMARKS, class_names=NAMES, keep_contributions=keep)
    with Coordinator(tmp_path / "with", terms) as server:
        agreement = describe(server, sites)
        others = [*sites[:1], *sites[2:]]
        for site in others:
            assert server.accept(site.statistics(agreement), site.name).ok
        before, without = seen(server.publish(), server.terms), server.pool.running().copy()
        assert server.accept(sites[1].statistics(agreement), "site-1").ok
        server.publish()
        tabulate(server, sites)
        bytes_of_it = None if keep else sites[1].sent(agreement, server.contribution_of("site-1"))
        evidence = getattr(server, gone)("site-1", bytes_of_it)
        assert server.pool.running() == without
        after = seen(server.current(), server.terms)
        assert same(replace(after, number=before.number), before)
    assert evidence.difference == (0.0 if keep else None)
    assert any("landmarks, drawn from" in each for each in evidence.remains)
    assert any("step of the integers" in each for each in evidence.remains)
    if gone == "forget":
        kept = [path for path in (tmp_path / "with").rglob("*") if path.is_file() and b"site-1" in path.read_bytes()]
        assert not kept


def test_moments_are_deleted_once_landmarks_are_drawn(tmp_path):
    sites = make_sites(tmp_path)
    with Coordinator(tmp_path / "server", Terms("f", method=LANDMARKS)) as server:
        for site in sites:
            server.describe(site.describe(server.invitation()), site.name)
        outline = server.outline()
        sent = [site.spread(outline) for site in sites]
        for site, data in zip(sites, sent, strict=True):
            assert server.spread(data, site.name).outcome == "accepted"
            assert server.spread(data, site.name).outcome == "duplicate"
        assert status_of(tmp_path / "server")["phase"] == "spreading"
        server.settle()
        assert [row["data"] for row in server.ledger.spreads()] == [b""] * 4
        late = server.spread(sent[0], "site-0")
        assert (late.outcome, "too late" in late.reason) == ("refused", True)
    for path in (tmp_path / "server").rglob("*"):
        assert not path.is_file() or not any(data[-64:] in path.read_bytes() for data in sent)


def test_a_late_site_and_one_that_comes_back(tmp_path):
    sites = make_sites(tmp_path, (30, 70, 20, 55, 600))
    with Coordinator(tmp_path / "server", Terms("f", method=LANDMARKS)) as server:
        agreement = contribute(server, sites[:3])
        server.publish()
        for site in sites[3:]:
            with pytest.raises(InputError, match="has no landmarks"):
                site.statistics(agreement)
            site.keep_landmarks(agreement, server.landmarks())
        assert server.accept(sites[3].statistics(agreement), "site-3").outcome == "accepted"
        told = sites[4].what_leaves(agreement)
        assert (told.n_samples, told.beyond) == (280, 320)  # four times what the range was made for
        assert server.accept(sites[4].statistics(agreement), "site-4").outcome == "accepted"
        both = seen(server.publish(), server.terms)
        assert both.n_samples == 30 + 70 + 20 + 55 + 280
        server.leave("site-3")
        assert server.accept(sites[3].statistics(agreement), "site-3").outcome == "refused"
        again = sites[3].statistics(agreement, again=True)
        assert server.accept(again, "site-3").outcome == "accepted"
        once_more = seen(server.publish(), server.terms)
        # Rounded by other numbers, or the difference of two messages would tell more than either.
        assert not torch.equal(once_more.weights, both.weights)
        torch.testing.assert_close(once_more.weights, both.weights, rtol=0, atol=0.05)


def test_rejoining_replaces_rows(tmp_path):
    sites = make_sites(tmp_path)
    for keep in (True, False):
        folder = tmp_path / str(keep)
        sites = make_sites(folder)
        with Coordinator(folder / "server", Terms("f", method=LANDMARKS, keep_contributions=keep)) as server:
            agreement = contribute(server, sites)
            server.publish()
            changed = Site(folder / "sites", "site-1", draw_shard(50, 77), NAMES)
            sent = changed.rejoin(agreement, server.contribution_of("site-1"))
            assert server.rejoin(sent["statistics"], "site-1", sent.get("former")).outcome == "accepted"
            server.publish()
            expected = [site.sent(agreement) for site in (sites[0], changed, *sites[2:])]
            summed = sum(decode(data, server.terms).integers for data in expected)
            assert np.array_equal(server.pool.running().vector, summed)


def test_status_result_and_influence_speak_landmarks(tmp_path):
    sites = make_sites(tmp_path)
    with Coordinator(tmp_path / "server", Terms("f", method=LANDMARKS)) as server:
        contribute(server, sites)
        published = seen(server.publish(), server.terms)
        assert set(server.influence()) == {site.name for site in sites}
        assert all(0 < value < 1 for value in server.influence().values())
    model = primary_model(tmp_path / "server", tmp_path / "primary.safetensors")
    assert summary(tmp_path / "server")["width"] == 40
    assert isinstance(model, LandmarkModel)
    x = sites[0].test.features
    phi = model.feature_map(model.normaliser(x))
    torch.testing.assert_close(load_model(tmp_path / "primary.safetensors").scores(x), phi @ published.weights)
    assert {row["form"] for row in status_of(tmp_path / "server")["clients"]} == {"integers"}


# ------------------------------------------------------------------------------------------- what a site keeps


def test_the_same_bytes_when_asked_twice_and_no_seed_leaves(tmp_path):
    first, *_ = sites = make_sites(tmp_path)
    with Coordinator(tmp_path / "server", Terms("f", method=LANDMARKS)) as server:
        agreement = contribute(server, sites)
        outline = server.outline()
        sent = server.landmarks()
    again = Site(first.folder, "site-0", first.train, NAMES)
    assert again.spread(outline) == first.spread(outline)
    assert again.statistics(agreement) == first.statistics(agreement)
    home = first.home(Terms("f"))
    seed = (home / "rounding.seed").read_bytes()
    assert len(seed) == 64
    assert (home / "rounding.seed").stat().st_mode & 0o077 == 0
    assert (home / f"landmarks-{sha256(sent)[:32]}.safetensors").read_bytes() == sent
    assert not [p for p in (tmp_path / "server").rglob("*") if p.is_file() and seed in p.read_bytes()]
    other = Site(tmp_path / "other", "site-0", first.train, NAMES)  # another seed of its own
    other.keep_landmarks(agreement, sent)
    vectors = [decode(site.statistics(agreement), Terms.from_json(agreement)).integers for site in (first, other)]
    assert 0 < np.abs(vectors[0] - vectors[1]).max() <= 1


def test_only_the_landmarks_of_the_terms_are_kept(tmp_path):
    site, *_ = sites = make_sites(tmp_path)
    with Coordinator(tmp_path / "server", Terms("f", method=LANDMARKS)) as server:
        agreement = contribute(server, sites)
        terms, data = server.terms, server.landmarks()
    assert len(terms.to_json()) < 2000
    found = open_landmarks(data, terms)
    turned = LandmarkMap(found.feature_map.points.flip(0), found.feature_map.scale)
    with pytest.raises(InputError, match="other landmarks than agreed"):
        site.keep_landmarks(agreement, seal_landmarks("f", Landmarks(turned, found.mean_squares)))
    path = site.home(terms) / f"landmarks-{terms.landmarks_sha256[:32]}.safetensors"
    path.write_bytes(data[:-1])
    with pytest.raises(InputError, match="other landmarks than agreed"):
        Site(site.folder, "site-0", site.train, NAMES).statistics(agreement, again=True)


def test_what_leaves_is_listed_before_and_after_the_terms_are_settled(tmp_path):
    site, *_ = sites = make_sites(tmp_path)
    draft = Terms("f", method=LANDMARKS)
    lines = site.what_leaves(draft.to_json().encode()).lines()
    assert any("from which the server draws landmarks" in line for line in lines)
    assert any("integers of 16 bits" in line for line in lines)
    with Coordinator(tmp_path / "server", draft) as server:
        agreement = contribute(server, sites)
        outline = server.outline()
    told = site.what_leaves(agreement)
    assert told.numbers == 40 * 41 // 2 + 40 * 3
    assert told.n_bytes == 2 * 40 * 39 // 2 + 20 * 40 * 3 // 8 + 4 * 40
    payload = len(site.spread(outline)) - 8 - int.from_bytes(site.spread(outline)[:8], "little")
    assert told.spread_bytes == site.what_leaves(outline).spread_bytes == 3 * (9 + 45) + 4  # two and a half columns
    assert payload < told.spread_bytes
    assert any(f"{told.numbers:,} integers of 16 bits at most" in line for line in told.lines())
    free = replace(draft, method=replace(LANDMARKS, landmarks="free"))
    assert not any("draws landmarks" in line for line in site.what_leaves(free.to_json().encode()).lines())


def test_entries_outside_the_range_are_counted_and_told(tmp_path, caplog):
    """A site whose rows all lie at one landmark has columns far above their expected mean square; it may join."""
    sites = make_sites(tmp_path)
    with Coordinator(tmp_path / "server", Terms("f", method=replace(LANDMARKS, normalise="row"))) as server:
        agreement = contribute(server, sites)
        landmarks = load_landmarks(server.ledger, server.terms)
        worst = int(landmarks.mean_squares.argmin())
        own = landmarks.feature_map.landmarks[worst]
        odd = Site(tmp_path / "odd", "odd", Shard(own.repeat(70, 1), torch.arange(70) % 3), NAMES)
        odd.keep_landmarks(agreement, server.landmarks())
        data = odd.statistics(agreement)
        length = int.from_bytes(data[:8], "little")
        told = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["apfl"])
        assert told["saturated"] > 0
        assert f"{told['saturated']} of 2800 entries of the activated features of odd were cut back" in caplog.text
        assert server.accept(data, "odd").outcome == "accepted"
        server.publish()


def test_a_site_that_the_primary_harms_goes_alone_with_landmarks_of_its_own(tmp_path):
    """The others' labels are another task's: the site's model owes nothing to them, not even landmarks."""
    sites = make_sites(tmp_path, (200, 400, 400))
    for site in sites[1:]:
        site.train = Shard(site.train.features, (site.train.labels + 1) % 3)
    terms = Terms("f", method=replace(LANDMARKS, gamma=1.0, beta=1e3, balance=0.1, tau=0.0))
    made = simulate(sites, terms, tmp_path / "server")
    settings_of = read(made.models[0]).settings
    model = load_model(made.models[0])
    assert settings_of["alone"]
    assert isinstance(model, LandmarkModel)
    agreement = (sites[0].home(Terms("f")) / "settled.json").read_bytes()
    assert model.feature_map.fingerprint not in Terms.from_json(agreement).fingerprints
    assert sites[0].evaluate(agreement)["accuracy"] > 0.8


# ------------------------------------------------------------------------------------------------------- terms


def test_what_landmark_terms_cannot_be_is_refused():
    with pytest.raises(InputError, match=r"bits=0 given.*Leave bits out"):
        Terms("f", method=APFL(map="landmarks", bits=0))
    with pytest.raises(InputError, match="normalise='none' given"):
        Terms("f", method=replace(LANDMARKS, normalise="none"))
    assert Terms("f", method=replace(LANDMARKS, normalise="none", landmarks="free")).landmarked


def test_terms_of_before_there_were_landmarks_keep_their_digest():
    """They say nothing of maps, and mean the random one, whatever the method's default is."""
    told = json.loads(Terms("f", method=FIXED).to_json())
    assert not {"map", "bits", "landmarks"} & set(told["method"])
    assert not {"most_rows", "spread", "n_landmarks", "landmarks_sha256"} & set(told)
    assert Terms.from_json(json.dumps(told)).method.map == "random"
    settled = Terms("f", method=LANDMARKS, most_rows=7)
    assert Terms.from_json(settled.to_json()) == settled
    assert settled.outlined


def test_who_leaves_before_landmarks_are_drawn_has_no_part_in_them(tmp_path):
    sites = make_sites(tmp_path)
    with Coordinator(tmp_path / "server", Terms("f", method=LANDMARKS)) as server:
        for site in sites:
            server.describe(site.describe(server.invitation()), site.name)
        outline = server.outline()
        for site in sites:
            server.spread(site.spread(outline), site.name)
        evidence = server.leave("site-1")
        assert any("step of the integers" in each for each in evidence.remains)
        assert not any("landmarks" in each for each in evidence.remains)
        server.settle()
        data = server.landmarks()
    others = [
        open_spread(site.spread(outline), Terms.from_json(outline)).integers for site in sites if site != sites[1]
    ]
    assert data == draw(Terms.from_json(outline), others)[1]


def test_settling_waits_for_the_moments_of_a_quorum(tmp_path):
    sites = make_sites(tmp_path)
    with Coordinator(tmp_path / "server", Terms("f", method=LANDMARKS, quorum=3)) as server:
        for site in sites:
            server.describe(site.describe(server.invitation()), site.name)
        outline = server.outline()
        for site in sites[:2]:
            server.spread(site.spread(outline), site.name)
        with pytest.raises(InputError, match="2 clients have sent the moments"):
            server.settle()
    with Coordinator(tmp_path / "server") as server:  # killed in between: what came is there
        assert server.spreading
        assert server.outline() == outline
        assert server.spread(sites[3].spread(outline), "site-3").ok
        server.settle()
        assert not server.spreading
        assert server.terms.width == 40


def test_terms_from_plain_values_say_what_is_wrong_and_nothing_else():
    with pytest.raises(InputError, match=r"^terms with map='landmarks' and bits=0 given"):
        Terms.checked({"federation": "f", "method": {"map": "landmarks", "bits": 0}})
