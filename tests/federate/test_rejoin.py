"""A site whose rows changed since it contributed: it says so, and `--rejoin` replaces them exactly."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from apfl.data.federation import Shard
from apfl.federate import Coordinator, Site, Terms
from apfl.federate.flower.answers import Answers
from apfl.federate.flower.questions import PHASES
from apfl.federate.messages import open_publication
from tests.commands import here as apfl
from tests.federate.federation_toys import AUTO, NAMES, contribute, draw_shard, make_sites, same, seen

TERMS = Terms("f", method=AUTO, class_names=NAMES)


def rows(train: Shard, keep: slice | torch.Tensor) -> Shard:
    return Shard(train.features[keep], train.labels[keep])


def with_rows(site: Site, train: Shard) -> Site:
    """The same site with other rows in its file."""
    return Site(site.folder, site.name, train, site.class_names, site.test)


def renewed(server: Coordinator, site: Site) -> dict[str, bytes]:
    """What the site answers when a run asks whether it rejoins."""
    digest = server.contribution_of(site.name)
    assert digest is not None
    return site.rejoin(server.settle(), digest)


@pytest.mark.parametrize("keep", [True, False])
def test_rejoining_is_as_if_the_former_rows_had_never_been_there(tmp_path, keep):
    terms = Terms("f", method=AUTO, class_names=NAMES, keep_contributions=keep)
    former, others = make_sites(tmp_path)[0], make_sites(tmp_path)[1:]
    new = with_rows(former, draw_shard(48, 77))
    with Coordinator(tmp_path / "server", terms) as server:
        contribute(server, [former, *others])
        server.publish()
        answer = renewed(server, new)
        assert set(answer) == ({"statistics"} if keep else {"statistics", "former"})
        assert server.rejoin(answer["statistics"], new.name, answer.get("former")).outcome == "accepted"
        assert server.current() is None  # the publication with the former rows is gone
        again = seen(server.publish(), server.terms)
        assert not {"site-0"} & server.ledger.gone()
        assert len(list((tmp_path / "server" / "blobs").glob("publication-*"))) == 1
    shutil.rmtree(tmp_path / "sites")
    with Coordinator(tmp_path / "fresh", terms) as server:  # the same terms, the new rows alone
        contribute(server, [new, *others])
        alone = seen(server.publish(), server.terms)
    assert torch.equal(again.weights, alone.weights)
    assert torch.equal(again.class_counts, alone.class_counts)
    assert again.gamma == alone.gamma
    assert torch.equal(again.leverage, alone.leverage)


def test_the_site_is_a_member_with_its_new_rows(tmp_path):
    former, *others = make_sites(tmp_path)
    new = with_rows(former, draw_shard(48, 77))
    with Coordinator(tmp_path / "server", TERMS) as server:
        contribute(server, [former, *others])
        server.publish()
        server.rejoin(renewed(server, new)["statistics"], new.name)
        server.publish()
        published = open_publication(server.deliver(new.name), server.terms)
        assert new._is_member(server.terms, published)
        assert not former._is_member(server.terms, published)
        assert renewed(server, new) == {}  # and has nothing to replace any more


def test_an_answer_that_was_lost_is_given_again(tmp_path):
    former, *others = make_sites(tmp_path)
    new = with_rows(former, draw_shard(48, 77))
    with Coordinator(tmp_path / "server", TERMS) as server:
        contribute(server, [former, *others])
        lost = renewed(server, new)
        assert renewed(server, new) == lost
        assert server.rejoin(lost["statistics"], new.name).outcome == "accepted"
        assert server.rejoin(lost["statistics"], new.name).outcome == "duplicate"


def test_rows_may_change_back(tmp_path):
    """The bytes that were taken out stay out, so the same rows come with new ones."""
    former, *others = make_sites(tmp_path)
    new = with_rows(former, draw_shard(48, 77))
    with Coordinator(tmp_path / "server", TERMS) as server:
        contribute(server, [former, *others])
        before = seen(server.publish(), server.terms)
        for site in (new, former):
            assert server.rejoin(renewed(server, site)["statistics"], site.name).outcome == "accepted"
        assert torch.equal(seen(server.publish(), server.terms).weights, before.weights)


@pytest.mark.parametrize("keep", [True, False])
def test_a_refused_answer_leaves_the_former_contribution(tmp_path, keep):
    former, *others = make_sites(tmp_path)
    new = with_rows(former, draw_shard(48, 77))
    with Coordinator(
        tmp_path / "server", Terms("f", method=AUTO, class_names=NAMES, keep_contributions=keep)
    ) as server:
        contribute(server, [former, *others])
        before = seen(server.publish(), server.terms)
        answer = renewed(server, new)["statistics"]
        refused = [
            server.rejoin(answer[:-9] + b"\xff" * 9, new.name),
            server.rejoin(answer, "site-1"),  # another site's key
            *([] if keep else [server.rejoin(answer, new.name), server.rejoin(answer, new.name, answer)]),
        ]
        assert {each.outcome for each in refused} == {"refused"}
        assert torch.equal(seen(server.current(), server.terms).weights, before.weights)
        assert server.pool.members()["site-0"] != refused[0].sha256


def test_a_server_that_dies_while_a_site_rejoins_has_the_former_contribution(tmp_path, monkeypatch):
    former, *others = make_sites(tmp_path)
    new = with_rows(former, draw_shard(48, 77))
    with Coordinator(tmp_path / "server", TERMS) as server:
        contribute(server, [former, *others])
        before = seen(server.publish(), server.terms)
        answer = renewed(server, new)["statistics"]

        def dies(*_: object) -> None:
            raise KeyboardInterrupt  # the former contribution is out by now

        monkeypatch.setattr(server.ledger, "write_contribution", dies)
        with pytest.raises(KeyboardInterrupt):
            server.rejoin(answer, new.name)
    with Coordinator(tmp_path / "server") as server:
        assert same(seen(server.current(), server.terms), before)
        assert server.pool.members()["site-0"] in open_publication(server.deliver("site-0"), server.terms).members
        assert server.ledger.gone() == frozenset()
        assert server.rejoin(answer, new.name).outcome == "accepted"  # and it goes on


def test_a_rejoining_site_waits_for_its_cohort(tmp_path):
    former, *others = make_sites(tmp_path)
    new = with_rows(former, draw_shard(48, 77))
    with Coordinator(tmp_path / "server", Terms("f", method=AUTO, class_names=NAMES, min_cohort=2)) as server:
        contribute(server, [former, *others])
        server.publish()
        assert server.rejoin(renewed(server, new)["statistics"], new.name).outcome == "withheld"
        assert seen(server.publish(), server.terms).n_samples == sum(len(site.train) for site in others)


def test_a_rejoining_site_does_not_take_the_primary_from_everybody(tmp_path):
    """Two members, quorum and cohort of two: one remained, one waited, and nothing could be published."""
    first, second, late, _ = make_sites(tmp_path)
    new = with_rows(first, draw_shard(48, 77))
    with Coordinator(tmp_path / "server", Terms("f", method=AUTO, class_names=NAMES, min_cohort=2)) as server:
        agreement = contribute(server, [first, second])
        before = seen(server.publish(), server.terms)
        answer = renewed(server, new)["statistics"]
        refused = server.rejoin(answer, new.name)
        assert refused.outcome == "refused"
        assert "only 1 of the 2 clients that a publication needs would remain" in refused.reason
        assert "rejoin after late sites (1 or more)" in refused.reason
        assert same(seen(server.current(), server.terms), before)
        assert server.accept(late.statistics(agreement), late.name).outcome == "withheld"
        assert server.rejoin(answer, new.name).outcome == "accepted"  # the cohort is complete
        assert server.publish().members == (first.name, second.name, late.name)


def test_every_run_asks_earlier_members_and_nobody_else(tmp_path):
    sites = make_sites(tmp_path)
    with Coordinator(tmp_path / "server", TERMS) as server:
        contribute(server, sites[:3])

        def owed(site: str, earlier: frozenset[str]) -> bool:
            return PHASES["rejoin"].owed(site, Answers(server, earlier=earlier))

        assert owed("site-0", frozenset(["site-0", "site-3"]))
        assert not owed("site-0", frozenset())  # it contributed in this very run
        assert not owed("site-3", frozenset(["site-0", "site-3"]))  # it has left since


def test_only_the_first_publication_waits_for_sites_that_are_not_connected(tmp_path):
    """While a rejoining site has taken its former rows out there is no publication, as before the first one."""
    pytest.importorskip("flwr", reason="needs the flower extra: pip install 'apfl[flower]'")
    from apfl.federate.flower.conversation import Conversation, Policy
    from apfl.federate.flower.events import Events

    former, *others = make_sites(tmp_path)
    folder = tmp_path / "server"
    (folder / "keys").mkdir(parents=True)
    for name in ("site-0", "site-1", "away"):
        (folder / "keys" / f"{name}.pub").touch()
    nodes = [SimpleNamespace(node_id=k, name=f"site-{k}") for k in range(2)]
    grid = SimpleNamespace(get_nodes=lambda: nodes)
    with Coordinator(folder, TERMS) as server:
        contribute(server, [former, *others])

        def waiting() -> set[str]:
            run = Conversation(grid, server, Policy(), Events(folder, "1"), folder)
            run.sites.look()
            run.earlier = frozenset()  # nobody is asked whether it rejoins
            return run._waiting(run._answers())

        assert waiting() == {"away"}
        server.publish()
        server.rejoin(renewed(server, with_rows(former, draw_shard(48, 77)))["statistics"], "site-0")
        assert server.current() is None
        assert waiting() == set()


# What the site says


@pytest.fixture
def contributed(tmp_path) -> tuple[Site, Terms, str]:
    sites = make_sites(tmp_path)
    for site in sites:
        site.train = Shard(site.train.features.float(), site.train.labels)  # as they come from a file
    with Coordinator(tmp_path / "server", TERMS) as server:
        contribute(server, sites)
        return sites[1], server.terms, server.contribution_of("site-1")


def test_it_says_how_the_rows_differ(contributed):
    site, terms, digest = contributed
    assert site.changed(terms, digest) is None
    assert site.changes() == {}
    n = torch.bincount(site.train.labels).tolist()
    fewer = with_rows(site, rows(site.train, site.train.labels != 1))
    assert fewer.changes() == {"f": f"{n[0] + n[2]} rows, 70 then; bee 0 ({n[1]} then)"}
    other = site.train.features.clone()
    other[3, 2] += 1e-6
    moved = with_rows(site, Shard(other, site.train.labels))
    assert moved.changed(terms, digest) == "70 rows, as many of each class as then, with other values"
    relabelled = site.train.labels.clone()
    relabelled[0] = 2
    assert "cat" in with_rows(site, Shard(site.train.features, relabelled)).changes()["f"]


def test_the_same_rows_in_another_order_are_the_same_rows(contributed, tmp_path):
    """An export without an order must not look like a change, nor the site like one that is not in the sum."""
    site, terms, digest = contributed
    shuffled = with_rows(site, rows(site.train, torch.randperm(70, generator=torch.manual_seed(0))))
    assert shuffled.changed(terms, digest) is None
    assert shuffled.statistics(terms.to_json().encode()) == site.sent(terms.to_json().encode(), digest)
    with Coordinator(tmp_path / "server") as server:
        server.publish()
        assert shuffled._is_member(terms, open_publication(server.deliver(shuffled.name), terms))


def test_rows_that_are_not_contributed_do_not_count(contributed):
    """A row of a class that the federation does not have may come and go."""
    site, terms, digest = contributed
    with_one_dog = with_rows(site, site.train)
    with_one_dog.class_names = (*NAMES, "dog")
    with_one_dog.train = Shard(
        torch.cat([site.train.features, torch.ones(1, 8)]), torch.cat([site.train.labels, torch.tensor([3])])
    )
    assert with_one_dog.changed(terms, digest) is None


def test_a_folder_of_an_earlier_version_is_read(contributed):
    site, terms, digest = contributed
    path = site.home(terms) / "sent.json"
    entries = json.loads(path.read_text()).items()
    path.write_text(
        json.dumps({key: {name: told[name] for name in ("data", "terms", "order")} for key, told in entries})
    )
    assert site.changed(terms, digest) is None
    assert "other values" in with_rows(site, draw_shard(48, 77)).changes()["f"]


def test_rows_that_another_federation_cannot_use_do_not_stop_a_site(contributed):
    site, _, _ = contributed
    wider = with_rows(site, draw_shard(40, 3, n_features=9))
    assert "width 9" in wider.changes()["f"]


def write(path: Path, site: Site) -> None:
    np.savez(path, features=site.train.features.numpy(), labels=site.train.labels.numpy(), class_names=np.array(NAMES))


def test_join_says_that_the_rows_changed_and_offers_to_rejoin(contributed, tmp_path, capsys, monkeypatch):
    pytest.importorskip("flwr", reason="needs the flower extra: pip install 'apfl[flower]'")
    site, _, _ = contributed
    configs = []
    monkeypatch.setattr("apfl.cli.site.stay_connected", lambda connection, *more: configs.append(connection.config))
    write(tmp_path / "rows.npz", with_rows(site, rows(site.train, slice(0, 60))))
    words = ["--server", "127.0.0.1:1", "--data", tmp_path / "rows.npz", "--name", "site-1", "--yes"]
    words += ["--folder", site.folder]
    assert apfl("federate", "join", *words) == 0
    told = " ".join(capsys.readouterr().err.split())
    assert "the rows have changed since they were contributed to f (60 rows, 70 then" in told
    assert "join again with --rejoin" in told
    assert apfl("federate", "join", *words, "--rejoin") == 0
    assert "with the next run these rows take the place" in " ".join(capsys.readouterr().err.split())
    assert [config["rejoin"] for config in configs] == [False, True]
    assert apfl("federate", "join", *words, "--rejoin", "--only-receive") == 2
    write(tmp_path / "rows.npz", site)
    assert apfl("federate", "join", *words) == 0
    assert "changed" not in capsys.readouterr().err
