"""A federation whose targets are columns, through the bytes that travel: its models are those of the simulator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from apfl.data.federation import Shard
from apfl.errors import InputError
from apfl.federate import Coordinator, Site, Terms, status_of
from apfl.federate.inprocess import simulate
from apfl.federate.numbers.messages import open_sum, open_table, seal_table
from apfl.federate.numbers.shared import STAGES, stages_of
from apfl.federate.primary import primary_model
from apfl.methods.apfl import APFL
from apfl.models.file import load_model, read
from tests.federate.federation_toys import NAMES, draw_shard
from tests.federate.number_toys import (
    SIZES,
    TARGETS,
    chosen,
    draw_targets,
    number_sites,
    number_terms,
    probe,
    settled,
)


def models_of(paths: list[Path]) -> list[torch.Tensor]:
    return [load_model(path).scores(probe()) for path in paths]


def gap(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max() / other.abs().max())


CASES = {
    "numbers": ("regression", APFL(), {}),
    "labels": ("multilabel", APFL(), {}),
    "copies": ("regression", APFL(), {"copies": 4}),
    "groups": ("regression", APFL(), {"groups": True}),
    "fixed": ("regression", APFL(gamma=0.5, beta=2.0, balance=0.7, weight=0.9, d_primary=30), {}),
    "beta open": ("regression", APFL(gamma=0.5, balance=1.0, d_primary=12), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_federations_models_and_bytes_are_the_simulators(case, tmp_path):
    target, method, drawn = CASES[case]
    shards = [draw_targets(n, k, target, **drawn) for k, n in enumerate(SIZES)]
    (round_,) = method.rounds(shards, len(TARGETS), 0)
    found = simulate(number_sites(tmp_path, shards), number_terms(target, method=method), tmp_path / "server")
    for own, model in zip(models_of(found.models), round_.models, strict=True):
        assert gap(own, model.scores(probe())) < 1e-9
    assert (found.payload_up, found.payload_down) == (round_.bytes_up, round_.bytes_down)


def test_a_site_that_is_better_off_alone_goes_alone_in_both(tmp_path, monkeypatch):
    """Whoever is not clearly worse off goes alone here: the models of it are other ones."""
    shards = [draw_targets(n, k) for k, n in enumerate(SIZES)]
    usual = simulate(number_sites(tmp_path / "usual", shards), number_terms(), tmp_path / "usual" / "server")
    monkeypatch.setattr("apfl.methods._numbers.CLEARLY", -2.0)
    (round_,) = APFL().rounds(shards, len(TARGETS), 0)
    found = simulate(number_sites(tmp_path, shards), number_terms(), tmp_path / "server")
    for own, model in zip(models_of(found.models), round_.models, strict=True):
        assert gap(own, model.scores(probe())) < 1e-9
    alone = [k for k, path in enumerate(found.models) if read(path).settings["alone"]]
    assert alone == round_.chosen["alone"]
    assert alone
    pairs = zip(models_of(found.models), models_of(usual.models), strict=True)
    assert [k for k, pair in enumerate(pairs) if not torch.equal(*pair)] == alone


def test_the_order_of_the_sites_and_of_their_columns_changes_nothing(tmp_path):
    shards = [draw_targets(n, k) for k, n in enumerate(SIZES)]
    found = []
    for way in ("one", "other"):
        sites = number_sites(tmp_path / way, shards)
        if way == "other":
            sites[2] = type(sites[2])(
                tmp_path / way / "sites", "site-2",
                replace(shards[2], targets=shards[2].responses(0).flip(1)), TARGETS[::-1],
            )  # fmt: skip
            sites = sites[::-1]
        simulate(sites, number_terms(), tmp_path / way / "server")
        paths = [site.model_path(number_terms()) for site in sorted(sites, key=lambda each: each.name)]
        found.append(models_of(paths))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


# ------------------------------------------------------------------------------------------------------- leaving


def test_after_a_site_left_all_is_as_if_it_had_never_sent_statistics(tmp_path):
    shards = [draw_targets(n, k) for k, n in enumerate(SIZES)]
    publications = {}
    for way in ("left", "never"):
        sites = number_sites(tmp_path / way, shards)
        with Coordinator(tmp_path / way / "server", number_terms()) as server:
            members = sites if way == "left" else sites[:2] + sites[3:]
            for site in sites:  # all describe themselves, and have a part in the landmarks
                server.describe(site.describe(server.invitation()), site.name)
            for site in sites:
                server.spread(site.spread(server.outline()), site.name)
            agreement = server.settle()
            for site in members:
                site.keep_landmarks(agreement, server.landmarks())
                assert server.accept(site.statistics(agreement), site.name).ok
            server.publish()
            if way == "left":
                chosen(server, sites, agreement)
                evidence = server.leave("site-2")
                assert evidence.difference == 0.0
                assert evidence.publication == 2
                assert any("everyone's sum" in line for line in evidence.remains)
            rest = sites[:2] + sites[3:]
            choice = chosen(server, rest, agreement)
            models = [rest[0].refine(agreement, server.deliver(rest[0].name), choice)]
            told = open_sum(server.deliver(rest[0].name), server.terms, rest[0].agreed_landmarks(server.terms))
            publications[way] = told.shared.stats, models_of(models)[0]
    (left, model), (never, other) = publications["left"], publications["never"]
    assert torch.equal(left.autocorrelation, never.autocorrelation)
    assert torch.equal(left.crosscorrelation, never.crosscorrelation)
    assert (left.n_samples, left.target_energy, left.n_copies) == (never.n_samples, never.target_energy, never.n_copies)
    assert torch.equal(model, other)


def test_a_server_that_keeps_only_the_sum_takes_a_site_out_by_the_bytes_it_brings(tmp_path):
    sites = number_sites(tmp_path, [draw_targets(n, k) for k, n in enumerate(SIZES)])
    with Coordinator(tmp_path / "server", number_terms(keep_contributions=False)) as server:
        agreement = settled(server, sites[:3])
        before = server.pool.running().copy()
        server.publish()
        sites[3].keep_landmarks(agreement, server.landmarks())
        assert server.accept(sites[3].statistics(agreement), "site-3").outcome == "withheld"  # one late site waits
        with pytest.raises(InputError, match="must send once more the bytes"):
            server.leave("site-1")
        server.leave("site-1", sites[1].sent(agreement))
        running = server.pool.running()
        assert running.n_samples == before.n_samples - SIZES[1]


def test_a_killed_server_goes_on_in_the_middle_of_a_choice_and_asks_nobody_twice(tmp_path):
    sites = number_sites(tmp_path, [draw_targets(n, k, "multilabel") for k, n in enumerate(SIZES)])
    terms = number_terms("multilabel")
    with Coordinator(tmp_path / "server", terms) as server:
        agreement = settled(server, sites)
        server.publish()
        assert server.stage == STAGES[0]
    seen = []
    for stage in STAGES:
        for site in sites:
            with Coordinator(tmp_path / "server") as server:
                assert server.stage == stage
                data = site.table(agreement, server.deliver(site.name), server.chosen_so_far())
                assert server.table(data, site.name).outcome == "accepted"
                assert server.table(data, site.name).outcome == "duplicate"
                state = status_of(tmp_path / "server")
                assert (state["phase"], state["tables"][-1]) == ("choosing", site.name)
        with Coordinator(tmp_path / "server") as server:
            seen.append(server.choose_stage())
    assert seen == list(STAGES)
    with Coordinator(tmp_path / "server") as server:
        sites[0].refine(agreement, server.deliver("site-0"), server.choose())
    state = status_of(tmp_path / "server")
    assert state["phase"] == "published"
    ledger_bytes = {row["name"]: row["bytes_up"] for row in state["clients"]}
    assert min(ledger_bytes.values()) > 8 * 400 * 11  # with the tables of all stages


def test_a_late_site_waits_for_a_second_one_and_then_all_choose_anew(tmp_path):
    shards = [draw_targets(n, k) for k, n in enumerate((*SIZES, 25))]
    sites = number_sites(tmp_path, shards)
    with Coordinator(tmp_path / "server", number_terms()) as server:
        agreement = settled(server, sites[:3])
        server.publish()
        chosen(server, sites[:3], agreement)
        for site in sites[3:]:
            site.keep_landmarks(agreement, server.landmarks())
            assert not server.ready()
            server.accept(site.statistics(agreement), site.name)
        assert server.ready()
        assert server.publish().members == tuple(site.name for site in sites)
        assert server.stage == STAGES[0]
        choice = chosen(server, sites, agreement)
        assert sites[4].refine(agreement, server.deliver("site-4"), choice).is_file()


def test_a_site_that_only_receives_has_a_model(tmp_path):
    """Its rows are in no sum, so leaving them out changes nothing about the primary."""
    sites = number_sites(tmp_path, [draw_targets(n, k) for k, n in enumerate(SIZES)])
    with Coordinator(tmp_path / "server", number_terms()) as server:
        agreement = settled(server, sites[:3])
        server.publish()
        choice = chosen(server, sites[:3], agreement)
        late = sites[3]
        late.keep_landmarks(agreement, server.landmarks())
        model = load_model(late.refine(agreement, server.deliver(late.name), choice))
        with pytest.raises(InputError, match="only members' tables count"):
            late.table(agreement, server.deliver(late.name))
    own = draw_targets(SIZES[3], 3)
    error = (model.scores(own.features) - own.responses(0)).square().mean(0)
    assert bool((error < 0.2 * own.responses(0).var(0)).all())


def test_the_shared_model_of_the_server_is_that_of_a_client_without_rows(tmp_path):
    from apfl.methods._numbers import Asked, NumberRows, fit_numbers

    shards = [draw_targets(n, k) for k, n in enumerate(SIZES)]
    simulate(number_sites(tmp_path, shards), number_terms(), tmp_path / "server")
    blend = fit_numbers([NumberRows(own.features, own.responses(0)) for own in shards], Asked(), 0)
    model = primary_model(tmp_path / "server", tmp_path / "shared.safetensors")
    assert gap(load_model(tmp_path / "shared.safetensors").scores(probe()), blend.shared.scores(probe())) < 1e-9
    assert tuple(model.class_names) == TARGETS


# ----------------------------------------------------------------------------------------------- what is refused


def refused(shard: Shard, match: str, names: tuple[str, ...] = TARGETS, terms: Terms | None = None) -> None:
    with pytest.raises(InputError, match=match):
        number_sites(Path("nowhere"), [shard], names)[0].describe((terms or number_terms()).to_json().encode())


def test_rows_that_do_not_fit_the_terms_are_refused_with_a_sentence(tmp_path):
    good = draw_targets(20, 0)
    refused(good, "target columns price, size given; the terms have price, rent", ("price", "size"))
    refused(draw_targets(20, 0, "multilabel"), "rows for multilabel given; this federation's terms say regression")
    missing = good.responses(0).clone()
    missing[3, 1] = float("nan")
    refused(replace(good, targets=missing), "targets contain NaN")
    refused(good, "features of width 5 given; the federation agreed on 7", terms=number_terms(n_features=7))
    classes = Site(tmp_path, "site", draw_shard(30, 0), NAMES)
    with pytest.raises(InputError, match="rows with classes given; this federation's terms say regression"):
        classes.describe(number_terms().to_json().encode())


def test_terms_that_would_tell_one_sites_sums_are_refused():
    with pytest.raises(InputError, match=r"could subtract its own\. Allowed are a quorum of 3 or more"):
        number_terms(quorum=2)
    with pytest.raises(InputError, match="late cohorts of 2 or more"):
        number_terms(min_cohort=1)
    with pytest.raises(InputError, match="Start the server with --plain"):
        number_terms(masked=True, n_features=5)
    with pytest.raises(InputError, match="without the names of their columns"):
        number_terms(class_names=None)
    with pytest.raises(InputError, match=r"tau=0\.5 given, which is of no use for regression"):
        number_terms(method=APFL(tau=0.5))
    with pytest.raises(InputError, match="the digits of float64"):
        number_terms(wire="float32")


def test_descriptions_of_other_columns_are_refused_by_the_server(tmp_path):
    sites = number_sites(tmp_path, [draw_targets(20, 0)], ("price", "size"))
    data = sites[0].describe(number_terms(class_names=("price", "size")).to_json().encode())
    with Coordinator(tmp_path / "server", number_terms()) as server:
        receipt = server.describe(data, "site-0")
        assert receipt.outcome == "refused"
        assert "other terms" in receipt.reason
        classes = number_terms().to_json()
        assert Terms.from_json(classes) == number_terms()


def test_sums_that_no_rows_have_are_refused(tmp_path):
    from apfl.federate.contribution import decode
    from apfl.federate.wire import seal, unseal

    sites = number_sites(tmp_path, [draw_targets(n, k) for k, n in enumerate((300, 70, 80))])
    with Coordinator(tmp_path / "server", number_terms(method=APFL(d_primary=12))) as server:
        agreement = settled(server, [*sites[1:], number_sites(tmp_path / "c", [draw_targets(90, 5)] * 4)[3]])
        good = sites[0]
        good.keep_landmarks(agreement, server.landmarks())
        data = good.statistics(agreement)
        sent = decode(data, server.terms)
        header = {}

        def keep(told):
            header.update({key: value for key, value in told.items() if key not in ("kind", "version")})
            return {name: ((_dtype(each),), tuple(each.shape)) for name, each in sent.tensors.items()}

        unseal("statistics", data, keep)

        def lie(name: str, change) -> str:
            tensors = {**sent.tensors, name: change(sent.tensors[name].clone())}
            receipt = server.accept(seal("statistics", header, tensors), "site-0")
            assert receipt.outcome == "refused", name
            return receipt.reason

        assert "NaN" in lie("crosscorrelation", lambda each: each.fill_(float("nan")))
        assert "contradict the matrix" in lie("class_counts", lambda each: each + 1000)
        assert "too long" in lie("target_energy", lambda each: each / 1e6)
        assert "n contradicts the matrix" in lie("autocorrelation", lambda each: each * 2)
        assert "indefinite" in lie(
            "autocorrelation", lambda each: _at(each, 1, 1e-3 * float(each[2]) ** 0.5 + each[1] + 30)
        )
        assert server.accept(data, "site-0").ok


def _at(values: torch.Tensor, place: int, value: float) -> torch.Tensor:
    values[place] = value
    return values


def _dtype(values: torch.Tensor) -> str:
    return {torch.float64: "F64", torch.int64: "I64"}[values.dtype]


def test_tables_out_of_turn_are_refused(tmp_path):
    sites = number_sites(tmp_path, [draw_targets(n, k) for k, n in enumerate(SIZES)])
    with Coordinator(tmp_path / "server", number_terms()) as server:
        agreement = settled(server, sites)
        server.publish()
        first = sites[0].table(agreement, server.deliver("site-0"))
        assert server.table(first, "site-1").reason == "a message of client 'site-0' sent by 'site-1'"
        assert server.table(first, "site-0").ok
        server.choose_stage()
        late = sites[1].table(agreement, server.deliver("site-1"))
        assert "tables of errors are added up now" in server.table(late, "site-1").reason
        so_far = server.chosen_so_far()
        good = open_table(sites[1].table(agreement, server.deliver("site-1"), so_far), server.terms)
        astray = seal_table(server.terms, "site-1", 1, "errors", "0" * 64, good.table)
        assert "made after another choice" in server.table(astray, "site-1").reason
        many = replace(good.table, models=replace(good.table.models, n=10_000))
        astray = seal_table(server.terms, "site-1", 1, "errors", good.after, many)
        assert "has contributed 70" in server.table(astray, "site-1").reason
        with pytest.raises(InputError, match="the tables of errors for publication 1 are still to be added up"):
            server.choose()
        with pytest.raises(InputError, match="wait for the whole of it"):
            sites[0].refine(agreement, server.deliver("site-0"), so_far)


def test_stages_follow_what_is_open():
    assert stages_of(number_terms()) == STAGES[:2]
    assert stages_of(number_terms("multilabel")) == STAGES
    assert stages_of(number_terms(method=APFL(beta=1.0))) == STAGES[1:2]


def test_what_leaves_says_that_members_see_everyones_sum(tmp_path):
    site = number_sites(tmp_path, [draw_targets(40, 0)])[0]
    lines = site.what_leaves(number_terms(max_rows=30).to_json().encode()).lines()
    told = "\n".join(lines)
    assert "2 target columns: price, rent" in told
    assert "the number of rows (30)" in told
    assert "every other member is sent the sum of these" in told
    assert "not sent: 10 rows beyond" in told
    assert "never: rows" in told


def test_a_site_with_more_rows_than_the_cap_learns_from_all_of_them(tmp_path):
    shards = [draw_targets(n, k) for k, n in enumerate((30, 70, 25))]
    sites = number_sites(tmp_path, shards)
    found = simulate(sites, number_terms(max_rows=40), tmp_path / "server")
    rows = {row["name"]: row["n"] for row in status_of(tmp_path / "server")["clients"]}
    assert rows == {"site-0": 30, "site-1": 40, "site-2": 25}
    capped, whole = load_model(found.models[1]), shards[1]
    error = (capped.scores(whole.features) - whole.responses(0)).square().mean(0)
    assert bool((error < 0.2 * whole.responses(0).var(0)).all())


# ----------------------------------------------------------------------------------------------------- odd tables


def _features(change):
    return lambda shard: replace(shard, features=change(shard.features))


FAR = torch.tensor([1, 1e-6, 1e6, 1, 1]), torch.tensor([0, 0, 1e9, 3, 0])
ODD = {
    "a constant column": _features(lambda x: torch.cat([x, torch.full_like(x[:, :1], 0.1)], 1)),
    "columns that depend on each other": _features(lambda x: torch.cat([x, 2 * x[:, :1] + x[:, 1:2]], 1)),
    "columns far from zero": _features(lambda x: x * FAR[0] + FAR[1]),
    "single precision": _features(lambda x: x.float()),
    "a constant target": lambda own: replace(own, targets=own.targets * torch.tensor([1, 0]) + 7),
    "targets far from zero": lambda own: replace(own, targets=own.targets + torch.tensor([2024.0, 1e6])),
}  # fmt: skip


@pytest.mark.parametrize("odd", ODD)
def test_odd_tables_give_the_simulators_models_too(odd, tmp_path):
    shards = [ODD[odd](draw_targets(n, k)) for k, n in enumerate((*SIZES, 3))]
    new = ODD[odd](draw_targets(40, 999)).features
    (round_,) = APFL().rounds(shards, len(TARGETS), 0)
    found = simulate(number_sites(tmp_path, shards), number_terms(), tmp_path / "server")
    for path, model in zip(found.models, round_.models, strict=True):
        own, wanted = load_model(path).scores(new), model.scores(new)
        # Standard deviations; a column at 1e9 has nine digits beyond its mean.
        assert float(((own - wanted) / shards[0].responses(0).std(0).clamp_min(1)).abs().max()) < 1e-8


def test_more_features_than_rows(tmp_path):
    shards = [draw_targets(n, k, n_features=60) for k, n in enumerate((12, 15, 9))]
    (round_,) = APFL().rounds(shards, len(TARGETS), 0)
    found = simulate(number_sites(tmp_path, shards), number_terms(), tmp_path / "server")
    for path, model in zip(found.models, round_.models, strict=True):
        assert gap(load_model(path).scores(probe(60)), model.scores(probe(60))) < 1e-9


# ------------------------------------------------------------------------------------------------------ changed rows


def test_a_site_with_changed_rows_takes_its_own_place_when_another_comes_along(tmp_path):
    shards = [draw_targets(n, k) for k, n in enumerate((*SIZES, 25))]
    sites = number_sites(tmp_path, shards)
    with Coordinator(tmp_path / "server", number_terms()) as server:
        agreement = settled(server, sites[:4])
        server.publish()
        chosen(server, sites[:4], agreement)
        longer = number_sites(tmp_path, [draw_targets(65, 1)])[0]
        longer = type(longer)(tmp_path / "sites", "site-1", longer.train, TARGETS)
        assert longer.changes() == {"f": "65 rows, 70 then; all 65 (70 then)"}
        sent = longer.rejoin(agreement, server.contribution_of("site-1") or "")
        receipt = server.rejoin(sent["statistics"], "site-1")
        assert receipt.outcome == "withheld", receipt  # its own sums would be the difference of two publications
        sites[4].keep_landmarks(agreement, server.landmarks())
        server.accept(sites[4].statistics(agreement), "site-4")
        assert server.publish().n_samples == sum(SIZES) - 5 + 25
        now = [sites[0], longer, *sites[2:]]
        assert longer.refine(agreement, server.deliver("site-1"), chosen(server, now, agreement)).is_file()


def test_new_landmarks_after_a_site_left_are_as_if_it_had_never_been_there(tmp_path):
    shards = [draw_targets(n, k) for k, n in enumerate(SIZES)]
    found = {}
    for way in ("left", "never"):
        sites = number_sites(tmp_path / way, shards)
        rest = [*sites[:2], sites[3]]
        with Coordinator(tmp_path / way / "server", number_terms()) as server:
            agreement = settled(server, sites if way == "left" else rest)
            server.publish()
            if way == "left":
                chosen(server, sites, agreement)
                server.leave("site-2")
                server.redraw()
                outline = server.outline()
                for site in rest:
                    server.spread(site.spread(outline), site.name)
                agreement = server.settle()
                for site in rest:
                    site.keep_landmarks(agreement, server.landmarks())
                    server.accept(site.statistics(agreement), site.name)
                server.publish()
            choice = chosen(server, rest, agreement)
            paths = [site.refine(agreement, server.deliver(site.name), choice) for site in rest]
            found[way] = server.terms, models_of(paths)
    assert found["left"][0] == found["never"][0]
    assert all(torch.equal(*pair) for pair in zip(found["left"][1], found["never"][1], strict=True))
