"""A federation through the bytes that travel: it gives what the method gives, whoever comes, goes and comes late."""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from apfl.cli import main
from apfl.data.federation import Shard
from apfl.errors import InputError
from apfl.federate import Coordinator, Site, Terms, status_of
from apfl.federate.contribution import decode
from apfl.federate.inprocess import payload_bytes, simulate
from apfl.federate.ledger import Ledger
from apfl.federate.messages import open_choice, open_table
from apfl.federate.sums import HI, LO, ExactSum
from apfl.maths.leaveout import ECHO
from apfl.maths.ridge import Statistics, one_hot, statistics
from apfl.maths.wire import statistics_bytes
from apfl.methods.apfl import APFL
from apfl.models.dual_stream import DualStream
from tests.federate.federation_toys import (
    AUTO,
    FIXED,
    NAMES,
    contribute,
    draw_shard,
    keep_the_primary,
    make_sites,
    same,
    seen,
    tabulate,
)

# ------------------------------------------------------------------------------------------ what comes out


def test_the_primary_is_central_ridge(tmp_path):
    sites = make_sites(tmp_path)
    with Coordinator(tmp_path / "server", Terms("f", method=FIXED)) as server:
        contribute(server, sites)
        weights = seen(server.publish(), server.terms).weights
        forms = {row["form"] for row in server.status()["clients"]}
        terms = server.terms
    assert forms == {"triangle", "factor"}
    z = terms.normaliser()(torch.cat([site.train.features for site in sites]))
    phi, y = terms.maps(z)[0](z), one_hot(torch.cat([site.train.labels for site in sites]), 3)
    # Another route: least squares on the rows themselves with sqrt(gamma) I below them.
    augmented = torch.cat([phi, torch.eye(40, dtype=torch.float64)])
    central = torch.linalg.lstsq(augmented, torch.cat([y, y.new_zeros(40, 3)]), driver="gels").solution
    torch.testing.assert_close(weights, central, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "method",
    [
        FIXED,
        AUTO,
        replace(AUTO, scope="client"),
        replace(AUTO, refinement="in-sample", tau=0.05, activation_primary="cosine"),
        APFL(map="random", normalise="standardise", intercept=True, sketch=16),
    ],
    ids=lambda method: f"{method.scope}-{method.refinement}-{method.normalise}-{method.gamma}",
)
def test_personal_models_are_those_of_the_method(tmp_path, method, monkeypatch):
    """With the settings that the server chose: it bounds tables before it adds them, and the method does not."""
    keep_the_primary(monkeypatch)
    sites = make_sites(tmp_path)
    made = simulate(sites, Terms("f", method=method, seed=3), tmp_path / "server")
    if method.scope == "federation":
        with Coordinator(tmp_path / "server") as server:
            beta, balance, tau = open_choice(server.choose(), server.terms).setting
        method = replace(method, beta=beta, balance=balance, tau=tau)
    *_, last = method.rounds([site.train for site in sites], 3, 3)
    for path, model in zip(made.models, last.models, strict=True):
        loaded = DualStream.load(path)
        torch.testing.assert_close(loaded.primary, model.primary, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(loaded.refinement, model.refinement, rtol=1e-9, atol=1e-9)
        assert loaded.balance == model.balance
        test = sites[0].test.features
        torch.testing.assert_close(loaded.scores(test), model.scores(test), rtol=1e-9, atol=1e-9)


def test_single_precision_on_the_wire_is_close(tmp_path):
    sites = make_sites(tmp_path)
    made = simulate(sites, Terms("f", method=FIXED, wire="float32"), tmp_path / "server")
    *_, last = FIXED.rounds([site.train for site in sites], 3, 0)
    for path, model in zip(made.models, last.models, strict=True):
        # 24 bits in the statistics, times the condition number of a system with ridge 1 (about 1e3 here).
        torch.testing.assert_close(DualStream.load(path).primary, model.primary, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("wire", ["float64", "float32"])
def test_byte_counts_are_what_was_sent(tmp_path, wire):
    sites = make_sites(tmp_path)
    terms = Terms("f", method=AUTO, wire=wire)
    made = simulate(sites, terms, tmp_path / "server")
    known = status_of(tmp_path / "server")
    assert known["bytes_up"] == made.bytes_up
    agreement = (tmp_path / "server", Terms.from_json(json.dumps(_plain(known["terms"]))))
    for site, row in zip(sites, known["clients"], strict=True):
        data = site.sent(agreement[1].to_json().encode())
        header = 8 + int.from_bytes(data[:8], "little")
        n, dtype = len(site.train), agreement[1].dtype
        payload = statistics_bytes(n, 40, 3, dtype)
        assert row["form"] == ("factor" if n < 40 else "triangle")
        assert len(data) == header + payload + 2 * ECHO
        assert header < 1000  # what is not statistics
        told = site.what_leaves(agreement[1].to_json().encode())
        assert told.n_bytes == payload - 8 * 3 - 16  # counts, n and energy are named by themselves


@pytest.mark.parametrize(
    ("method", "sizes"),
    [
        (FIXED, (30, 70, 20, 55)),
        (replace(FIXED, refinement="in-sample", normalise="standardise", intercept=True), (40, 41, 42)),
        (replace(FIXED, d_refinement=40, tau=0.1), (6, 7)),
        (AUTO, (30, 70, 20, 55)),
        (replace(AUTO, d_refinement=40, normalise="auto"), (39, 40, 41)),
        (replace(AUTO, scope="client", sketch=16), (6, 90)),
        (replace(AUTO, tau=0.1), (50, 60)),
        (replace(AUTO, normalise="columns", refinement="in-sample", balance=0.3), (8, 64)),
        (APFL(map="random", sketch=16), (30, 300)),
    ],
    ids=lambda value: str(value) if isinstance(value, tuple) else f"{value.scope}-{value.normalise}-{value.gamma}",
)
def test_simulated_bytes_are_those_sent(tmp_path, method, sizes):
    sites = make_sites(tmp_path, sizes)
    made = simulate(sites, Terms("f", method=method), tmp_path / "server")
    *_, last = method.rounds([site.train for site in sites], 3, 0)
    assert (last.bytes_up, last.bytes_down) == (made.payload_up, made.payload_down)


def test_payload_is_the_tensors_of_a_message(tmp_path):
    (site,) = make_sites(tmp_path, (30,))
    draft = Terms("f", method=replace(AUTO, normalise="columns"), quorum=1)
    with Coordinator(tmp_path / "server", draft) as server:
        contribute(server, [site])
        data = server.publish().data
    tensors = load(data)
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "weights": (40, 3), "class_counts": (3,), "leverage": (40, 128)
    }  # fmt: skip
    assert payload_bytes(data) == sum(tensor.numpy().nbytes for tensor in tensors.values())


def _plain(terms: dict) -> dict:
    return {key: value for key, value in terms.items() if key not in ("digest", "settled")}


# ------------------------------------------------------------------------------- who comes, goes and comes late


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("gone", ["leave", "forget"])
def test_a_client_that_left_never_joined(tmp_path, keep, gone):
    sites = make_sites(tmp_path)
    terms = Terms("f", method=AUTO, class_names=NAMES, keep_contributions=keep)
    with Coordinator(tmp_path / "with", terms) as server:
        agreement = contribute(server, sites)
        server.publish()
        tabulate(server, sites)
        bytes_of_it = None if keep else sites[1].sent(agreement, server.contribution_of("site-1"))
        evidence = getattr(server, gone)("site-1", bytes_of_it)
        without, choice = seen(server.current(), server.terms), tabulate(server, [*sites[:1], *sites[2:]])
    others = make_sites(tmp_path / "anew")
    others = [*others[:1], *others[2:]]
    with Coordinator(tmp_path / "without", terms) as server:
        contribute(server, others)
        never = seen(server.publish(), server.terms)
        chosen = open_choice(tabulate(server, others), server.terms)
        assert same(without, never)
        # The tables name the publication's number, so their hashes differ; what they say does not.
        assert open_choice(choice, server.terms).setting == chosen.setting
        assert open_choice(choice, server.terms).n_samples == chosen.n_samples
    assert evidence.members == 3
    assert evidence.deleted == (1,)
    assert evidence.publication == 2
    assert evidence.holders == ("site-0", "site-2", "site-3")
    assert evidence.residual < 1e-12
    assert evidence.difference == (0.0 if keep else None)
    assert any("0.0e+00" in line if keep else "residual" in line for line in evidence.lines())


def test_leaving_without_kept_contributions_needs_the_exact_bytes(tmp_path):
    sites = make_sites(tmp_path)
    with Coordinator(tmp_path / "server", Terms("f", method=FIXED, keep_contributions=False)) as server:
        agreement = contribute(server, sites)
        assert not list((tmp_path / "server" / "blobs").glob("contribution-*"))
        server.publish()
        with pytest.raises(InputError, match="must send once more"):
            server.leave("site-0")
        with pytest.raises(InputError, match="only exactly those"):
            server.leave("site-0", sites[1].sent(agreement))
        assert server.leave("site-0", sites[0].sent(agreement)).members == 3


def test_forgetting_keeps_what_was_refused_of_others(tmp_path):
    """Their refusals stay; where a reason names the forgotten client it does so no more, and site-10 is not site-1."""
    with Coordinator(tmp_path / "server", Terms("f", method=FIXED)) as server:
        contribute(server, make_sites(tmp_path))
        for client, reason in (("site-10", "site-10 said nonsense"), ("site-3", "the bytes say site-1, not site-3")):
            server.ledger.db.execute(
                "INSERT INTO refusals (client, what, sha256, bytes, reason, received) VALUES (?, 'x', '', 0, ?, 0)",
                (client, reason),
            )
        server.publish()
        server.forget("site-1")
        kept = server.ledger.db.execute("SELECT client, reason FROM refusals ORDER BY rowid").fetchall()
    assert [tuple(row) for row in kept] == [
        ("site-10", "site-10 said nonsense"),
        ("site-3", "the bytes say (forgotten), not site-3"),
    ]


def test_forgetting_leaves_no_trace_on_disk(tmp_path):
    sites = make_sites(tmp_path)
    with Coordinator(tmp_path / "server", Terms("f", method=FIXED)) as server:
        agreement = contribute(server, sites)
        server.accept(b"rubbish", "site-2")
        server.accept(sites[2].sent(agreement).replace(b"site-2", b"site-9"), "site-2")
        server.accept(sites[2].sent(agreement), "site-0")
        server.publish()
        for site in sites:
            server.deliver(site.name)
        digest = server.contribution_of("site-2")
        assert _mentions(tmp_path / "server", b"site-2")
        evidence = server.forget("site-2")
        assert "site-2" not in {row["name"] for row in server.status()["clients"]}
        assert not _mentions(tmp_path / "server", b"site-2")
        assert not (tmp_path / "server" / "blobs" / f"contribution-{digest}.safetensors").exists()
        assert evidence.holders == ("site-0", "site-1", "site-3")
        # Until they have refitted, they hold a primary with the client in it.
        holding = {row["name"]: row["holds"] for row in server.status()["clients"]}
        assert holding["site-0"] == [1]
        site = sites[0]
        site.refine(agreement, server.deliver("site-0"))
        server.confirm("site-0", site.publication(server.terms))
        assert {row["name"]: row["holds"] for row in server.status()["clients"]}["site-0"] == [2]
        refused = server.accept(sites[2].sent(agreement), "site-2")
        assert refused.outcome == "refused"
        assert "left" in refused.reason


def _mentions(folder: Path, text: bytes) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and text in path.read_bytes()]


def test_a_client_that_left_may_come_back(tmp_path):
    sites = make_sites(tmp_path)
    with Coordinator(tmp_path / "server", Terms("f", method=AUTO)) as server:
        agreement = contribute(server, sites)
        before = seen(server.publish(), server.terms)
        server.leave("site-1")
        assert server.accept(sites[1].statistics(agreement), "site-1").outcome == "refused"
        with pytest.raises(InputError, match="left already"):
            server.leave("site-1")
        assert server.accept(sites[1].statistics(agreement, again=True), "site-1").outcome == "accepted"
        after = seen(server.publish(), server.terms)
        assert torch.equal(after.weights, before.weights)
        assert after.number == 3


def test_a_message_under_way_does_not_bring_a_client_back(tmp_path):
    sites = make_sites(tmp_path)
    with Coordinator(tmp_path / "server", Terms("f", method=FIXED)) as server:
        for site in sites:
            server.describe(site.describe(server.invitation()), site.name)
        agreement = server.settle()
        late = sites[0].statistics(agreement)
        assert server.leave("site-0").sha256 is None
        server.describe(sites[0].describe(server.invitation()), "site-0")
        refused = server.accept(late, "site-0")
        assert (refused.outcome, refused.reason) == (
            "refused", "site-0 has left; to come back, it must make a new contribution"
        )  # fmt: skip
        assert server.accept(sites[0].statistics(agreement, again=True), "site-0").outcome == "accepted"


def test_a_full_disk_is_not_the_clients_fault(tmp_path, monkeypatch):
    sites = make_sites(tmp_path)
    with Coordinator(tmp_path / "server", Terms("f", method=FIXED)) as server:
        for site in sites:
            server.describe(site.describe(server.invitation()), site.name)
        agreement = server.settle()
        sent = sites[0].statistics(agreement)

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", full)
            with pytest.raises(InputError, match="No space left"):
                server.accept(sent, "site-0")
        assert server.status()["n_refusals"] == 0
        assert server.contribution_of("site-0") is None
        assert server.accept(sent, "site-0").outcome == "accepted"


def test_what_the_terms_took_from_a_client_is_named(tmp_path):
    sites = make_sites(tmp_path)
    with Coordinator(
        tmp_path / "server", Terms("f", method=APFL(map="random", normalise="standardise", d_refinement=16))
    ) as server:
        contribute(server, sites)
        server.publish()
        evidence = server.leave("site-0")
    assert len(evidence.remains) == 3
    assert any("mean and std" in line for line in evidence.lines())


def test_the_same_contribution_counts_once_and_another_is_refused(tmp_path):
    sites = make_sites(tmp_path)
    with Coordinator(tmp_path / "server", Terms("f", method=FIXED)) as server:
        agreement = contribute(server, sites)
        first = seen(server.publish(), server.terms)
        for _ in range(2):
            assert server.accept(sites[0].statistics(agreement), "site-0").outcome == "duplicate"
        assert not server.ready()
        assert server.publish().number == 1
        assert same(seen(server.current(), server.terms), first) is True
        other = Site(tmp_path / "other", "site-0", draw_shard(50, 5), NAMES)
        refused = server.accept(other.statistics(agreement), "site-0")
        assert refused.outcome == "refused"
        assert "must leave" in refused.reason


@settings(max_examples=5)  # each writes two folders
@given(st.permutations(range(4)), st.lists(st.booleans(), min_size=4, max_size=4), st.booleans())
def test_order_and_grouping_do_not_matter(order, restarts, keep):
    """Bit for bit, with publications and restarts anywhere in between."""
    terms = Terms("f", method=FIXED, quorum=1, class_names=NAMES, n_features=8, keep_contributions=keep)
    with TemporaryDirectory() as one, TemporaryDirectory() as other:
        sites = make_sites(Path(one))
        with Coordinator(Path(one) / "server", terms) as server:
            contribute(server, sites)
            plain = seen(server.publish(), server.terms)
        server = Coordinator(Path(other) / "server", terms)
        server.describe(sites[0].describe(server.invitation()))
        agreement = server.settle()
        for k, restart in zip(order, restarts, strict=True):
            assert server.accept(sites[k].statistics(agreement)).outcome == "accepted"
            if restart:
                server.publish()
                server.close()
                server = Coordinator(Path(other) / "server")
        assert torch.equal(seen(server.publish(), server.terms).weights, plain.weights)
        server.close()


def test_late_clients_are_folded_in_by_cohorts(tmp_path):
    sites = make_sites(tmp_path, (30, 70, 20, 55, 45))
    with Coordinator(tmp_path / "server", Terms("f", method=FIXED, min_cohort=2)) as server:
        agreement = contribute(server, sites[:2])
        assert server.publish().members == ("site-0", "site-1")
        receipt = server.accept(sites[2].statistics(agreement), "site-2")
        assert receipt.outcome == "withheld"
        assert "1 of 2" in receipt.reason
        assert not server.ready()
        assert server.publish().number == 1
        assert server.accept(sites[3].statistics(agreement), "site-3").outcome == "accepted"
        assert server.ready()
        assert len(server.publish().members) == 4
        assert server.accept(sites[4].statistics(agreement), "site-4").outcome == "withheld"
        assert server.leave("site-4").deleted == ()  # it was in nothing yet
        assert server.publish().number == 2


def test_joining_after_training_needs_only_the_publication(tmp_path, monkeypatch):
    keep_the_primary(monkeypatch)
    sites = make_sites(tmp_path)
    method = replace(AUTO, tau=0.2)
    terms = Terms("f", method=method)
    with Coordinator(tmp_path / "server", terms) as server:
        agreement = contribute(server, sites[:3])
        server.publish()
        choice = tabulate(server, sites[:3])
        late = sites[3]
        path = late.refine(agreement, server.deliver("site-3"), choice)
        refused = server.table(late.table(agreement, server.deliver("site-3")), "site-3")
        assert "not in publication" in refused.reason
        model, published = DualStream.load(path), seen(server.current(), server.terms)
        assert len(server.publish().members) == 3
    # The primary has not seen its rows: what the refinement is fitted to is the plain residual.
    z = server.terms.normaliser()(late.train.features)
    psi, phi = server.terms.maps(z)[1](z), server.terms.maps(z)[0](z)
    residual = one_hot(late.train.labels, 3) - phi @ published.weights
    beta = open_choice(choice, server.terms).setting[0]
    expected = torch.linalg.solve(psi.T @ psi + beta * torch.eye(24, dtype=torch.float64), psi.T @ residual)
    torch.testing.assert_close(model.refinement, expected, rtol=1e-9, atol=1e-9)
    # A late client of the method is this client: same refinement, same prior.
    *_, last = method.rounds([site.train for site in sites[:3]], 3, 0)
    (admitted,) = last.admit([late.train])
    torch.testing.assert_close(admitted.refinement, model.refinement, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(admitted.prior, model.prior, rtol=1e-9, atol=1e-9)
    assert float(model.prior.abs().max()) > 0.01


def test_terms_never_send_the_factor():
    with pytest.raises(InputError, match=r"sketch=0 .* 1 or more"):
        Terms("f", method=replace(AUTO, sketch=0))
    with pytest.raises(InputError, match=r"sketch=0 .* 1 or more"):
        Terms.from_json(json.dumps({"federation": "f", "method": {"sketch": 0}}))


@pytest.mark.parametrize(("key", "value"), [("refinement", "cross-fitted"), ("scope", "shrunk")])
def test_terms_with_removed_options_say_so(key, value):
    with pytest.raises(InputError, match="was removed"):
        Terms.from_json(json.dumps({"federation": "f", "method": {key: value}}))
    kept = Terms.from_json(json.dumps({"federation": "f", "method": {"refinement": "in-sample"}}))
    assert kept == Terms("f", method=APFL(map="random"))  # what terms of before there were landmarks mean


def test_fixed_settings_need_no_sketch(tmp_path):
    sites = make_sites(tmp_path)
    with Coordinator(tmp_path / "server", Terms("f", method=FIXED)) as server:
        contribute(server, sites)
        assert seen(server.publish(), server.terms).leverage is None


def test_nothing_is_published_below_the_quorum(tmp_path):
    sites = make_sites(tmp_path)
    with Coordinator(tmp_path / "server", Terms("f", method=FIXED, quorum=3)) as server:
        for site in sites[:2]:
            server.describe(site.describe(server.invitation()))
        with pytest.raises(InputError, match="quorum is 3"):
            server.settle()
        assert "not settled" in server.accept(b"early").reason
        server.describe(sites[2].describe(server.invitation()))
        agreement = server.settle()
        for site in sites[:2]:
            server.accept(site.statistics(agreement))
        assert not server.ready()
        with pytest.raises(InputError, match="quorum is 3"):
            server.publish()
        server.accept(sites[2].statistics(agreement))
        assert server.ready()
        server.publish()
        server.leave("site-0")
        assert server.current() is None  # and nothing is, until there are three again
        assert not server.ready()
        server.accept(sites[3].statistics(agreement))
        assert server.ready()
        assert server.publish().members == ("site-1", "site-2", "site-3")


# ------------------------------------------------------------------------------------------- before it leaves


def with_rare_class(folder: Path) -> Site:
    shard = draw_shard(60, 4)
    labels = shard.labels.clone()
    labels[labels == 2] = 0
    labels[0] = 2  # one row alone
    return Site(folder, "rare", Shard(shard.features, labels), NAMES, draw_shard(30, 5))


def test_classes_with_too_few_rows_are_withheld(tmp_path, monkeypatch):
    keep_the_primary(monkeypatch)
    rare, common = with_rare_class(tmp_path / "sites"), make_sites(tmp_path, (50,))[0]
    with Coordinator(tmp_path / "server", Terms("f", method=AUTO)) as server:
        agreement = contribute(server, [rare, common])
        contribution = decode(rare.sent(agreement), server.terms)
        assert contribution.n_samples == 59
        assert contribution.statistics.class_counts[2] == 0
        keep = rare.train.labels != 2
        z = server.terms.normaliser()(rare.train.features[keep])
        plain = statistics(server.terms.maps(z)[0](z), one_hot(rare.train.labels[keep], 3))
        assert torch.equal(contribution.statistics.autocorrelation, plain.autocorrelation)
        server.publish()
        choice = tabulate(server, [rare, common])
        table = open_table(rare.table(agreement, server.deliver("rare")), server.terms)
        assert int(table.hits.max()) <= 59
        # At home the row is used all the same.
        model = DualStream.load(rare.refine(agreement, server.deliver("rare"), choice))
        assert bool(model.refinement[:, 2].abs().sum() > 0)
        assert bool(torch.isfinite(model.scores(rare.train.features)).all())
    told = rare.what_leaves(agreement)
    assert told.withheld == {"cat": 1}
    assert told.n_samples == 59
    assert any("class cat with 1 row," in line for line in told.lines())
    assert any("59" in line for line in told.lines())


def test_one_may_agree_to_share_single_rows(tmp_path):
    rare, common = with_rare_class(tmp_path / "sites"), make_sites(tmp_path, (50,))[0]
    with Coordinator(tmp_path / "server", Terms("f", method=FIXED, min_per_class=1)) as server:
        agreement = contribute(server, [rare, common])
        assert decode(rare.sent(agreement), server.terms).n_samples == 60


def test_a_site_without_enough_rows_says_so(tmp_path):
    lonely = Site(tmp_path, "lonely", Shard(torch.randn(3, 8), torch.tensor([0, 1, 2])), NAMES)
    with pytest.raises(InputError, match="nothing to contribute"):
        lonely.describe(Terms("f").to_json().encode())


def test_classes_and_labels_are_matched_by_name(tmp_path):
    one, other = make_sites(tmp_path, (50, 60))
    turned = Site(other.folder, other.name, Shard(other.train.features, 2 - other.train.labels), NAMES[::-1])
    terms = Terms("f", method=FIXED)
    a, b = (simulate([one, each], terms, tmp_path / name) for each, name in ((other, "straight"), (turned, "turned")))
    assert torch.equal(DualStream.load(a.models[0]).primary, DualStream.load(b.models[0]).primary)
    strange = Site(tmp_path, "strange", draw_shard(40, 7), ("ant", "dog", "cat"))
    agreement = json.dumps(_plain(status_of(tmp_path / "turned")["terms"])).encode()
    assert strange.what_leaves(agreement).unknown == {"dog": int((strange.train.labels == 1).sum())}


def test_changed_terms_are_refused_by_the_site(tmp_path):
    sites = make_sites(tmp_path)
    with Coordinator(tmp_path / "server", Terms("f", method=FIXED)) as server:
        agreement = contribute(server, sites)
        terms = server.terms
    assert terms.departs_from(Terms("f", method=FIXED)) is None
    looser = replace(terms, min_per_class=1).to_json().encode()
    with pytest.raises(InputError, match="min_per_class has changed"):
        sites[0].statistics(looser)
    wider = replace(terms, method=replace(terms.method, gamma="auto")).to_json().encode()
    with pytest.raises(InputError, match="gamma has changed"):
        sites[0].statistics(wider)
    other_map = replace(terms, fingerprints=("0" * 64, "0" * 64)).to_json().encode()
    with pytest.raises(InputError, match="comes out differently"):
        sites[0].statistics(other_map)
    with pytest.raises(InputError, match="draft"):
        sites[0].statistics(Terms("f", method=FIXED).to_json().encode())
    assert sites[0].statistics(agreement) == sites[0].sent(agreement)


# --------------------------------------------------------------------------------------- the client's own


def test_the_personal_model_works_offline(tmp_path, capsys, monkeypatch):
    keep_the_primary(monkeypatch)
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        shard = draw_shard(120, ord(name))
        test = rng.random(120) < 0.25
        np.savez(
            tmp_path / f"{name}.npz", features=shard.features, labels=np.array(NAMES)[shard.labels], test=test
        )  # fmt: skip
    sites = [
        Site.from_file(tmp_path / "sites", f"site-{name}", str(tmp_path / f"{name}.npz"), test_column="test")
        for name in ("a", "b")
    ]
    made = simulate(sites, Terms("f", method=AUTO), tmp_path / "server")
    main_returns(["predict", str(made.models[0]), str(tmp_path / "a.npz")])
    written, printed = capsys.readouterr()
    # By another route: the class names that it writes, against the file's.
    said = [line.split(",")[1] for line in written.splitlines()[1:]]
    right = np.mean(np.array(said) == np.load(tmp_path / "a.npz")["labels"])
    assert f"accuracy {right:.4f} on 120 labelled rows" in printed
    assert right > 0.4
    with Coordinator(tmp_path / "server") as server:
        agreement = server.settle()
        told = sites[0].evaluate(agreement)
        assert told["n_test"] == len(sites[0].test)
        assert told["accuracy"] > 0.4
        assert server.metrics(sites[0].metrics(agreement), "site-a").outcome == "accepted"
        assert server.status()["clients"][0]["accuracy"] == told["accuracy"]
    fraction = Site.from_file(tmp_path / "sites", "c", str(tmp_path / "a.npz"), test_fraction=0.5)
    assert len(fraction.test) == 60
    with pytest.raises(InputError, match="no model yet"):
        fraction.evaluate(agreement)


def test_a_site_names_no_class_for_a_row_of_zeros(tmp_path):
    sites = make_sites(tmp_path)
    simulate(sites, Terms("f", method=AUTO), tmp_path / "server")
    with Coordinator(tmp_path / "server") as server:
        agreement = server.settle()
    site, rows = sites[0], sites[0].test.features.clone()
    before = site.predict(agreement, rows)
    assert set(before) <= set(NAMES)
    rows[3] = 0
    with pytest.warns(UserWarning, match=r"1 of 40 rows has no decision: row 3 \(every feature is zero\)"):
        after = site.predict(agreement, rows)
    assert after == [None if row == 3 else name for row, name in enumerate(before)]
    names = [NAMES[i] for i in site.test.labels.tolist()]
    with pytest.warns(UserWarning, match="no decision"):
        told = Site(tmp_path / "sites", site.name, site.train, NAMES, Shard(rows, site.test.labels)).evaluate(agreement)
    assert told["accuracy"] == sum(a == b for a, b in zip(after, names, strict=True)) / 40


def test_a_site_refuses_missing_values_and_rows_that_cannot_be_used(tmp_path):
    rows, n = draw_shard(30, 0).features, np.arange(30)
    columns = {"test": np.where(n == 4, np.nan, n % 2), "patient": np.where(n == 6, "", "p"), "free": n * np.nan}
    np.savez(tmp_path / "a.npz", features=rows, labels=np.array(NAMES)[n % 3], **columns)
    assert len(Site.from_file(tmp_path, "a", str(tmp_path / "a.npz")).train) == 30
    for options, row in (({"test_column": "test"}, 4), ({"group_column": "patient"}, 6)):
        with pytest.raises(InputError, match=rf"is missing \(row {row}, counted from 0\)"):
            Site.from_file(tmp_path, "a", str(tmp_path / "a.npz"), **options)
    np.savez(tmp_path / "b.npz", features=rows, labels=np.where(n == 8, "", "ant"))
    with pytest.raises(InputError, match=r"1 of 30 labels .* is missing \(row 8,"):
        Site.from_file(tmp_path, "b", str(tmp_path / "b.npz"))
    invitation = Terms("f", method=FIXED).to_json().encode()
    rows[5, 1] = np.nan
    with pytest.raises(InputError, match=r"the features \(first in row 5, counted from 0\) contain NaN"):
        Site(tmp_path, "a", Shard(rows, torch.from_numpy(n % 3)), NAMES).describe(invitation)


def main_returns(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 0


# ------------------------------------------------------------------------------------------------ the ledger


def test_status_says_where_it_stands_while_the_server_works(tmp_path):
    sites = make_sites(tmp_path)
    with Coordinator(tmp_path / "server", Terms("f", method=AUTO)) as server:
        assert status_of(tmp_path / "server")["phase"] == "describing"
        agreement = contribute(server, sites[:3])
        server.accept(b"rubbish", "site-3")
        known = status_of(tmp_path / "server")
        assert known["phase"] == "contributing"
        assert [row["state"] for row in known["clients"]] == ["pending"] * 3
        server.publish()
        assert status_of(tmp_path / "server")["phase"] == "choosing"
        tabulate(server, sites[:3])
        server.describe(sites[3].describe(server.invitation()))
        known = status_of(tmp_path / "server")
        assert known["phase"] == "published"
        assert [row["state"] for row in known["clients"]] == ["member"] * 3 + ["described"]
        assert known["n_refusals"] == 1
        assert known["publications"][0]["members"] == ["site-0", "site-1", "site-2"]
        assert json.loads(json.dumps(known)) == known
        with pytest.raises(InputError, match="in use"):
            Coordinator(tmp_path / "server")
        assert agreement == server.settle()
    with pytest.raises(InputError, match="other terms"):
        Coordinator(tmp_path / "server", Terms("f", method=AUTO, quorum=3))
    with pytest.raises(InputError, match="no federation"):
        status_of(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="no federation"):
        Coordinator(tmp_path / "elsewhere")


def test_a_damaged_ledger_is_said_to_be_damaged(tmp_path):
    sites = make_sites(tmp_path)
    with Coordinator(tmp_path / "server", Terms("f", method=FIXED)) as server:
        contribute(server, sites)
    blob = next((tmp_path / "server" / "blobs").glob("contribution-*"))
    blob.write_bytes(blob.read_bytes()[:-1] + b"!")
    with Coordinator(tmp_path / "server") as server, pytest.raises(InputError, match="changed on disk"):
        server.publish()
    (tmp_path / "server" / "ledger.sqlite").write_bytes(b"nonsense" * 1000)
    with pytest.raises(InputError, match="cannot be used as a ledger"):
        Ledger(tmp_path / "server")


# ------------------------------------------------------------------------------------------------ exact sums


@given(st.integers(1, 6), st.integers(0, 10**6), st.floats(-8, 8))
def test_sums_are_exact_and_order_free(n_parts, seed, magnitude):
    rng = np.random.default_rng(seed)
    parts = [_any_statistics(rng, 10**magnitude) for _ in range(n_parts)]
    forwards, backwards = ExactSum.zero(3, 2), ExactSum.zero(3, 2)
    for part in parts:
        forwards.add(part)
    random.Random(seed).shuffle(parts)
    guest = _any_statistics(rng, 1.0)
    backwards.add(guest)
    for part in parts:
        backwards.add(part)
    backwards.add(guest, -1)
    assert forwards == backwards
    # Against rational arithmetic: each part is rounded once, to half a unit of the lowest digit.
    for entry in range(3):
        true = sum(Fraction(float(part.crosscorrelation[entry, 0])) for part in parts)
        at = 6 + 2 * entry
        ours = Fraction(int(forwards.hi[at]), 2**HI) + Fraction(int(forwards.lo[at]), 2**LO)
        assert abs(ours - true) <= Fraction(n_parts, 2 ** (LO + 1))
        assert abs(forwards.lo).max() <= 2 ** (LO - HI - 1)


def _any_statistics(rng: np.random.Generator, scale: float) -> Statistics:
    matrix = torch.from_numpy(rng.normal(size=(3, 3)) * scale)
    return Statistics(
        matrix + matrix.T, torch.from_numpy(rng.normal(size=(3, 2)) * scale), torch.tensor([1.0, 2.0]).double(), 3, 3.0
    )


def test_terms_round_trip_and_say_what_is_wrong():
    terms = Terms("f", class_names=NAMES, method=AUTO, seed=7, wire="float32")
    assert Terms.from_json(terms.to_json()) == terms
    assert Terms.from_json(terms.to_json()).digest == terms.digest
    with pytest.raises(InputError, match="did you mean 'quorum'"):
        Terms.checked({"federation": "f", "quorom": 2})
    with pytest.raises(InputError, match="quorum"):
        Terms.checked({"federation": "f", "quorum": 0})
    with pytest.raises(InputError, match="did you mean 'gamma'"):
        Terms.checked({"federation": "f", "method": {"gama": 1}})
    with pytest.raises(InputError, match="federation name"):
        Terms("../elsewhere")
    with pytest.raises(InputError, match="no JSON"):
        Terms.from_json(b"{")
    with pytest.raises(InputError, match="all must differ"):
        Terms("f", class_names=("a", "a"))
