"""Work on other engines: a real Ray cluster of several processes, jobs of submitit; killed, stopped, compared."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from apfl.cli.options import TABLE
from apfl.cli.stats import _landmarks
from apfl.data.executors import Event, Executor
from apfl.data.executors.local import Local
from apfl.data.executors.slurm import Slurm
from apfl.data.extract.shards import InShards
from apfl.data.load import extract_source
from apfl.data.source import Source
from apfl.errors import InputError
from apfl.federate.stats.passes import Pass
from apfl.federate.stats.spread_out import summed_on
from apfl.federate.terms import Terms
from tests.commands import here
from tests.experiments.plan_toys import SMALL
from tests.experiments.test_bench import results
from tests.federate.federation_toys import NAMES
from tests.federate.test_stats import _closed_servers, agreed_files, federation, whole, write_shards  # noqa: F401

PLAN = f"""{SMALL}
[methods.fedavg_ft]
n_rounds = 20
tune = {{finetune_epochs = [0, 2]}}
"""


class Doubled:
    """Work of which an item can ask for anything: to fail, to be killed, to take long, to say who does it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.n_done = folder, 0

    def __call__(self, item: Any, tell: Any) -> Any:
        tell(0.5)
        if item == "bad":
            raise ValueError("what is bad")
        if item == "killed" and not (self.folder / "killed").exists():
            (self.folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if item == "slow":
            time.sleep(2)
        self.n_done += 1
        return [2 * item, os.getpid(), self.n_done]


def outcome(executor: Executor, folder: Path, items: list[Any]) -> dict[Any, Event[Any]]:
    events = [event for event in executor.map(Doubled(folder), items) if event.kind in ("done", "failed")]
    assert len(events) == len(items)
    return {event.item: event for event in events}


def test_an_item_waits_for_what_it_needs_and_is_left_if_that_fails(tmp_path):
    needs = {3: "bad", 5: 4, 6: 3}
    events = list(Local(2).map(Doubled(tmp_path), [3, 5, "bad", 4, 6], needs.get))
    kinds = [(event.kind, event.item) for event in events if event.kind != "reached"]
    assert kinds.index(("done", 4)) < kinds.index(("begun", 5))
    assert {item for kind, item in kinds if kind == "left"} == {3, 6}
    assert ("done", 5) in kinds
    (why,) = (event.info for event in events if event.kind == "failed")
    assert "what is bad" in why


@pytest.mark.slow
def test_a_killed_process_costs_its_own_item(tmp_path):
    events = outcome(Local(2), tmp_path, [1, "killed", 2, 3])
    assert events["killed"].info == "its process was ended by signal 9 (out of memory?)"
    assert [events[k].info[0] for k in (1, 2, 3)] == [2, 4, 6]


@pytest.mark.filterwarnings("ignore")  # submitit's debug executor leaves its logs open
@pytest.mark.parametrize("cluster", ["debug", pytest.param("local", marks=pytest.mark.slow)])
def test_jobs_of_submitit(cluster, tmp_path):
    """In this process, and in processes of their own."""
    pytest.importorskip("submitit", reason="needs the slurm extra: pip install 'apfl[slurm]'")
    engine = Slurm(tmp_path / "jobs", 2, cluster=cluster)
    items = [1, "bad", 2] if cluster == "debug" else [1, "bad", "killed", 2]
    events = outcome(engine, tmp_path, items)
    assert [events[k].info[0] for k in (1, 2)] == [2, 4]
    assert "what is bad" in events["bad"].info
    assert (events[1].info[1] == os.getpid()) is (cluster == "debug")
    if cluster == "local":
        assert "ended without a result" in events["killed"].info
    assert not (tmp_path / "jobs").exists()


# ----------------------------------------------------------------------------------------- features and statistics


def test_shards_of_features_make_the_file_of_one_extraction(tmp_path):
    """Killed in the middle: what was finished is not extracted again."""
    source, plain, out = Source("digits", backbone="identity"), tmp_path / "plain.npz", tmp_path / "out.npz"
    extract_source(source, source.open(), plain, batch_size=100)
    counted = Counted(tmp_path, Local(2), 1000)
    with pytest.raises(InputError, match=r"rows 1000 to 1200: its process was ended by signal 9 .* goes on"):
        extract_source(source, source.open(), out, batch_size=100, passing=InShards(counted, source, out, 2))
    assert len(list(tmp_path.glob(".out.npz.shards/*.npz"))) == 8
    extract_source(source, source.open(), out, batch_size=100, passing=InShards(Local(1), source, out, 2))
    assert out.read_bytes() == plain.read_bytes()
    assert not list(tmp_path.glob(".out*"))


class Killing:
    """Work that is killed once, at the shard that begins with this."""

    def __init__(self, folder: Path, work: Any, doomed: Any) -> None:
        self.folder, self.work, self.doomed = folder, work, doomed

    def __call__(self, item: Any, tell: Any) -> Any:
        if item[0] == self.doomed and not (self.folder / "killed").exists():
            (self.folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return self.work(item, tell)


class Counted(Executor):
    """An executor whose process is killed in the middle, and which counts what it is asked for."""

    def __init__(self, folder: Path, engine: Executor, doomed: Any) -> None:
        self.folder, self.engine, self.doomed = folder, engine, doomed
        self.asked: list[int] = []

    def team(self, work: Any, n_items: int) -> Any:
        self.asked.append(n_items)
        return self.engine.team(Killing(self.folder, work, self.doomed), n_items)


def test_statistics_by_many_processes_are_those_of_one_pass(tmp_path, capsys):
    made = federation(tmp_path)
    files, terms = write_shards(tmp_path / "shards", whole()), agreed_files(tmp_path / "home", made)
    options = ["--jobs", "2"]
    assert here("stats", *files, "--terms", terms, "--out", tmp_path / "one.safetensors") == 0
    assert here("stats", *files[::-1], "--terms", terms, "--out", tmp_path / "many.safetensors", *options) == 0
    assert (tmp_path / "many.safetensors").read_bytes() == (tmp_path / "one.safetensors").read_bytes()
    assert sorted(path.name for path in tmp_path.glob("many*")) == ["many.safetensors"]
    files[0].write_bytes(b"damaged")
    assert here("stats", *files, "--terms", terms, "--out", tmp_path / "bad.safetensors", *options) == 2
    assert "the parts of finished shards are in" in " ".join(capsys.readouterr().err.split())
    assert len(list((tmp_path / "bad.safetensors.parts").glob("*.safetensors"))) == 4


# ---------------------------------------------------------------------------------------------------------- Ray


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Two nodes of two cores each: processes of their own, which start their workers themselves."""
    ray = pytest.importorskip("ray", reason="needs the ray extra: pip install 'apfl[ray]'")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 2, "object_store_memory": 80_000_000, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=node)
    try:
        made.add_node(**node)
        yield made.address
    finally:
        ray.shutdown()
        made.shutdown()


@pytest.fixture
def on_ray(cluster, monkeypatch) -> str:
    monkeypatch.setenv("RAY_ADDRESS", cluster)
    return cluster


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_on_ray_a_killed_worker_costs_its_cell_and_all_else_is_as_on_this_machine(on_ray, tmp_path):
    from apfl.data.executors.ray import Ray

    engine = Ray(tmp_path / "jobs", n_workers=2)
    events = outcome(engine, tmp_path, [1, "killed", 2, "bad", 3, 4])
    assert [events[k].info[0] for k in (1, 2, 3, 4)] == [2, 4, 6, 8]
    assert "its process ended on Ray" in events["killed"].info
    assert "what is bad" in events["bad"].info
    assert max(events[k].info[2] for k in (1, 2, 3, 4)) > 1  # what the work keeps is there for the next item
    assert not (tmp_path / "jobs").exists()
    again = outcome(engine, tmp_path, ["killed"])
    assert again["killed"].kind == "done"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_plan_gives_the_same_records_on_ray_and_after_a_kill(on_ray, tmp_path, capsys):
    plan = tmp_path / "small.toml"
    plan.write_text(PLAN)
    assert here("bench", plan, "--out", tmp_path / "here", "--jobs", "1") == 0
    assert here("bench", plan, "--out", tmp_path / "ray", "--on", "ray", "--jobs", "2") == 0
    assert results(tmp_path / "ray") == results(tmp_path / "here")
    assert not list((tmp_path / "ray" / "checkpoints").iterdir())
    longer = tmp_path / "longer.toml"
    longer.write_text(PLAN.replace("n_rounds = 20", "n_rounds = 2000"))
    code = "from apfl.cli import main; main()"
    arguments = ["bench", str(longer), "--out", str(tmp_path / "killed"), "--on", "ray", "--jobs", "1"]
    command = subprocess.Popen([sys.executable, "-c", code, *arguments], stderr=subprocess.PIPE, text=True)
    worker = _worker_of_a_checkpoint(tmp_path / "killed")
    os.kill(worker, signal.SIGKILL)
    _, said = command.communicate(timeout=300)
    assert command.returncode == 1, said
    assert "its process ended on Ray" in said
    assert len(results(tmp_path / "killed")) == 3


def _worker_of_a_checkpoint(folder: Path) -> int:
    """The process of Ray that runs a cell with rounds, once it has a checkpoint."""
    until = time.monotonic() + 120
    while not list(folder.glob("checkpoints/*-seed*.safetensors")) and time.monotonic() < until:
        time.sleep(0.01)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and b"ray::_attempted" in (entry / "cmdline").read_bytes():
            return int(entry.name)
    raise AssertionError("no worker of Ray is at work")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_features_and_statistics_on_ray_have_the_bytes_of_this_machine(on_ray, tmp_path):
    one, many = tmp_path / "one.npz", tmp_path / "many.npz"
    features, on = ["features", "digits", "--backbone", "identity", "--batch-size", "4"], ["--on", "ray", "--jobs", "2"]
    assert here(*features, "--out", one) == 0
    assert here(*features, "--out", many, *on) == 0
    assert many.read_bytes() == one.read_bytes()
    files, terms = write_shards(tmp_path / "shards", whole()), agreed_files(tmp_path / "home", federation(tmp_path))
    summed = ["stats", *files, "--terms", terms, "--threads", "1"]
    assert here(*summed, "--out", tmp_path / "one.safetensors") == 0
    assert here(*summed, "--out", tmp_path / "many.safetensors", *on) == 0
    assert (tmp_path / "many.safetensors").read_bytes() == (tmp_path / "one.safetensors").read_bytes()
    assert not list(tmp_path.glob(".*")), "no scratch folder is left"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_killed_worker_costs_its_shard_of_features(on_ray, tmp_path):
    from apfl.data.executors.ray import Ray

    source, plain, out = Source("digits", backbone="identity"), tmp_path / "plain.npz", tmp_path / "out.npz"
    extract_source(source, source.open(), plain, batch_size=300)
    engine = Counted(tmp_path, Ray(tmp_path / "jobs", n_workers=2), 600)
    with pytest.raises(InputError, match=r"rows 600 to 1200: .* goes on"):
        extract_source(source, source.open(), out, batch_size=300, passing=InShards(engine, source, out, 2))
    assert len(list(tmp_path.glob(".out.npz.shards/*.npz"))) == 2
    extract_source(source, source.open(), out, batch_size=300, passing=InShards(engine, source, out, 2))
    assert out.read_bytes() == plain.read_bytes()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_killed_worker_costs_its_shard_of_statistics(on_ray, tmp_path):
    from apfl.data.executors.ray import Ray

    files, path = write_shards(tmp_path / "shards", whole()), agreed_files(tmp_path / "home", federation(tmp_path))
    terms, landmarks = Terms.from_json(path.read_bytes()), _landmarks(Terms.from_json(path.read_bytes()), path, None)
    assert here("stats", *files, "--terms", path, "--threads", "1", "--out", tmp_path / "one.safetensors") == 0
    engine = Counted(tmp_path, Ray(tmp_path / "jobs", n_workers=2), str(files[1].absolute()))
    many = tmp_path / "many.safetensors"
    given = dict.fromkeys(TABLE)
    with pytest.raises(InputError, match=rf"{files[1].name}: .* goes on"):
        summed_on(engine, terms, landmarks, files, many, given, 1.0, 1)
    summed_on(engine, terms, landmarks, files, many, given, 1.0, 1)
    assert engine.asked == [len(files), 1]
    assert many.read_bytes() == (tmp_path / "one.safetensors").read_bytes()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_ctrl_c_on_ray_keeps_what_is_done_and_where_the_rest_stands(on_ray, tmp_path):
    endless = tmp_path / "endless.toml"
    endless.write_text(PLAN.replace("n_rounds = 20", "n_rounds = 1_000_000").replace("= 0\n", "= 1000\n", 1))
    out = tmp_path / "out"
    arguments = ["bench", str(endless), "--out", str(out), "--on", "ray", "--jobs", "1", "--methods", "fedavg_ft"]
    code = "from apfl.cli import main; main()"
    process = subprocess.Popen([sys.executable, "-c", code, *arguments], stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 120
    while not list(out.glob(".jobs/*/*.note")) and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    assert "Run the same command again to resume" in said
    assert list(out.glob("checkpoints/*")), "a process that is stopped writes where it stands"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--on", "rya"], "no place to work 'rya'; did you mean 'ray'?"),
        (["--slurm", "time=3"], "--slurm given with --on local"),
        (["--on", "slurm", "--slurm", "time"], "--slurm 'time' given; expected KEY=VALUE"),
        (["--on", "slurm", "--slurm", "time=soon"], "give whole minutes"),
        (["--on", "slurm"], "run this where sbatch is"),
    ],
)
def test_bad_values_of_on_are_one_sentence(options, said, tmp_path, capsys):
    if "slurm" in options:
        pytest.importorskip("submitit", reason="needs the slurm extra: pip install 'apfl[slurm]'")
    plan = tmp_path / "small.toml"
    plan.write_text(PLAN)
    assert here("bench", plan, "--out", tmp_path / "out", *options) == 2
    text = capsys.readouterr().err
    assert said in text
    assert "Traceback" not in text


def test_what_is_not_installed_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    plan = tmp_path / "small.toml"
    plan.write_text(PLAN)
    assert here("bench", plan, "--out", tmp_path / "out", "--on", "ray") == 2
    assert "pip install 'apfl[ray]'" in capsys.readouterr().err


def test_notes_tell_how_far_an_item_has_got(tmp_path):
    """On a cluster that shares nothing but files."""
    from apfl.data.executors.notes import Note

    note = Note(tmp_path / "note")
    assert note.read() is None
    note(0.25)
    note(0.5)  # within the same second
    assert note.read() == 0.25
    assert json.loads((tmp_path / "note").read_text()) == 0.25
    note.remove()
    assert note.read() is None


# ------------------------------------------------------------------------------------- engines that people have


def lines_of_the_page(begin: str) -> str:
    """The block of docs/clusters.md that begins with these words."""
    page = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()
    (lines,) = re.findall(rf"```text\n({re.escape(begin)}.*?)```", page, re.DOTALL)
    return str(lines)


def of_the_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """What the first lines define, the rows as a table, and the sums of `apfl stats` over them."""
    agreed_files(tmp_path, federation(tmp_path / "federation"))
    rows, names = whole(), dict[str, Any]()
    monkeypatch.chdir(tmp_path)
    exec(lines_of_the_page("import numpy"), names)
    table = {f"f{i}": rows.features[:, i].numpy() for i in range(rows.features.shape[1])}
    table["label"] = np.array(NAMES)[rows.labels.numpy()]
    (tmp_path / "rows").mkdir()
    for k, some in enumerate(np.array_split(np.arange(len(rows)), 3)):
        pq.write_table(pa.table({name: column[some] for name, column in table.items()}), f"rows/{k}.parquet")
    files = sorted(Path("rows").glob("*.parquet"))
    return names, table, Pass(names["stage"], files, tmp_path / "part.safetensors").run().statistics()


def test_the_sum_of_the_page_is_that_of_apfl_stats(tmp_path, monkeypatch):
    names, table, expected = of_the_site(tmp_path, monkeypatch)
    total = names["sums"](table)
    both = torch.cat([expected.autocorrelation, expected.crosscorrelation], 1).numpy()
    np.testing.assert_allclose(total, both, rtol=0, atol=1e-10 * np.abs(both).max())
