"""The whole stress suite (tests/stress.py): apfl's defaults beside ridge regression in small federations of every kind.

    python benchmarks/stress.py --out runs/stress --jobs 8

Every finished case is a line of OUT/records.jsonl; the same command resumes an interrupted run. Prints Markdown tables.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the suite lives with the tests, which are not installed

import torch
from tests.stress import TROUBLES, Case, cases, doubled, draw, judge

HEAD = (
    "| {} | cases | worst difference to the better ridge | mean difference | not judged | "
    "worst \\|left-out - test\\| | failed |\n| --- | ---: | --- | ---: | ---: | --- | ---: |"
)


def work(job: tuple[int, Case]) -> dict[str, Any]:
    i, case = job
    torch.set_num_threads(1)
    started = time.perf_counter()
    try:
        verdict = judge(*draw(case))
    except Exception as error:
        raise RuntimeError(f"case {i}, {case}, failed: {error}") from error
    answers = {"good": verdict.good, "honest": verdict.honest, "seconds": round(time.perf_counter() - started, 2)}
    return {"i": i, "case": str(case)} | asdict(verdict) | answers


def read(path: Path) -> list[dict[str, Any]]:
    """The records so far. A line that an interruption cut short is dropped from the file."""
    if not path.is_file():
        return []
    text = path.read_text()
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    return [json.loads(line) for line in whole.splitlines()]


def run(todo: list[tuple[int, Case]], path: Path, jobs: int, n_done: int) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"  # the processes read it when they start
    with multiprocessing.get_context("spawn").Pool(jobs) as pool, path.open("a") as out:
        for count, record in enumerate(pool.imap_unordered(work, todo), n_done + 1):
            print(json.dumps(record), file=out, flush=True)
            verdict = "" if not failed(record) else "  FAILED"
            print(f"{count} / {n_done + len(todo)}  {record['case']}  {record['seconds']} s{verdict}", file=sys.stderr)


# ------------------------------------------------------------------------------------------------------ tables


def failed(record: dict[str, Any]) -> bool:
    return not (record["good"] and record["honest"])


def parts(record: dict[str, Any]) -> tuple[str, str]:
    """Data set and trouble, from the case's name."""
    found = re.fullmatch(r"(\S+) N=.* K=\d+ (.+) #\d+", record["case"])
    assert found is not None, record["case"]
    return found[1], found[2]


def difference(record: dict[str, Any]) -> float:
    """Points above the better of pooled and per-client ridge regression."""
    return float(100 * (record["accuracy"] - max(record["pooled"], record["alone"])))


def gap(record: dict[str, Any]) -> float:
    """How far the left-out accuracy is from the test accuracy, in standard errors."""
    return float(abs(record["left_out"] - record["accuracy"]) / record["left_out_error"])


def row(name: str, some: list[dict[str, Any]]) -> str:
    worst = min(some, key=difference)
    judged = [record for record in some if record["left_out"] is not None]
    farthest = max(judged, key=gap, default=None)
    columns = [
        name,
        len(some),
        f"{difference(worst):+.1f} ({worst['case']})",
        f"{sum(map(difference, some)) / len(some):+.1f}",
        len(some) - len(judged),
        "-" if farthest is None else f"{gap(farthest):.1f} (#{farthest['i']})",
        sum(map(failed, some)),
    ]
    return f"| {' | '.join(map(str, columns))} |"


def table(title: str, records: list[dict[str, Any]], key: Callable[[dict[str, Any]], str], order: list[str]) -> str:
    groups = {name: [record for record in records if key(record) == name] for name in order}
    return "\n".join([HEAD.format(title), *(row(name, some) for name, some in groups.items() if some)])


def report(records: list[dict[str, Any]]) -> str:
    records = sorted(records, key=lambda record: record["i"])
    data = list(dict.fromkeys(parts(record)[0] for record in records))
    bad = [record for record in records if failed(record)]
    lines = [
        table("trouble", records, lambda record: parts(record)[1], list(TROUBLES)),
        table("data", records, lambda record: parts(record)[0], data),
        "\n".join(
            f"- {r['case']}: {difference(r):+.1f} points (standard error {100 * r['below_error']:.1f})"
            + ("" if r["honest"] else f", left-out {100 * r['left_out']:.1f} % for {100 * r['accuracy']:.1f} %")
            for r in bad
        ),
        f"{len(bad)} of {len(records)} cases failed.",
    ]
    return "\n\n".join(line for line in lines if line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/stress"), help="the folder of records.jsonl")
    parser.add_argument("--cases", type=int, default=360)
    parser.add_argument("--most-rows", type=int, default=20_000, help="leave out cases with more training rows")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes, of one thread each")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    path, drawn = given.out / "records.jsonl", cases(given.cases)
    wanted = [case for case in drawn + doubled(drawn) if case.n <= given.most_rows]
    done = {record["case"] for record in read(path)}
    todo = [(i, case) for i, case in enumerate(wanted) if str(case) not in done]
    todo.sort(key=lambda job: job[1].n)  # the quick ones first
    if todo:
        run(todo, path, given.jobs, len(wanted) - len(todo))
    names = {str(case) for case in wanted}
    print(report([record for record in read(path) if record["case"] in names]))


if __name__ == "__main__":
    main()
