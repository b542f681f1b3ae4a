"""Reading records back from files and folders."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from apfl.cli import main
from apfl.data import load_dataset
from apfl.errors import InputError
from apfl.experiments.record import keep_record, read_records
from apfl.experiments.run import Protocol, federate, run
from apfl.methods import load_method


def test_records_come_from_lines_single_files_and_folders(tmp_path):
    dataset, protocol = load_dataset("digits"), Protocol(n_clients=4, alpha=1.0)
    made = []
    for seed in (0, 1):
        federation = federate(dataset, protocol, seed)
        made.append(run("afl", load_method("afl"), federation, dataset, protocol, seed)[0])
    keep_record(made[0], tmp_path / "a" / "records.jsonl")
    cell = tmp_path / "b" / "cells" / "afl-1.json"
    cell.parent.mkdir(parents=True)
    cell.write_text(made[1].to_json())
    (tmp_path / "b" / "failed").mkdir()
    (tmp_path / "b" / "failed" / "other.txt").write_text("not a record")
    assert [r.seed for r in read_records(tmp_path / "a" / "records.jsonl")] == [0]
    assert [r.seed for r in read_records(cell)] == [1]
    assert [r.seed for r in read_records(tmp_path)] == [0, 1]
    assert read_records(tmp_path)[1] == made[1]
    assert made[0].threads == 1  # conftest sets one
    assert read_records(tmp_path / "nothing") == []
    cell.write_text("{")
    with pytest.raises(InputError, match=r"afl-1\.json cannot be read"):
        read_records(tmp_path)


def test_records_of_removed_options_are_read_but_not_run_again(tmp_path, capsys):
    dataset, protocol = load_dataset("digits"), Protocol(n_clients=4, alpha=1.0)
    federation = federate(dataset, protocol, 0)
    record, _ = run("apfl", load_method("apfl", d_primary=64), federation, dataset, protocol, 0)
    kept = tmp_path / "records.jsonl"
    keep_record(replace(record, settings={**record.settings, "refinement": "cross-fitted"}), kept)
    assert read_records(kept)[0].settings["refinement"] == "cross-fitted"

    def status(*arguments: str) -> int:
        with pytest.raises(SystemExit) as ended:
            main([*arguments, str(kept)])
        return int(ended.value.code or 0)

    assert status("table") == 0
    assert "apfl" in capsys.readouterr().out
    assert status("rerun") == 2
    assert "'cross-fitted' was removed" in capsys.readouterr().err
    keep_record(record, tmp_path / "now.jsonl")
    assert json.loads((tmp_path / "now.jsonl").read_text())["settings"]["refinement"] == "in-sample"
