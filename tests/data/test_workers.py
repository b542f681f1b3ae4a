"""Worker processes that decode: the same files, whoever dies and whenever."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from apfl.data import open_source
from apfl.data.backbones import Backbone
from apfl.data.extract import decode
from apfl.data.extract.chunk import Reader
from apfl.data.extract.features import extract
from apfl.data.extract.pipeline import Batching, through
from apfl.data.samples import Samples
from apfl.errors import InputError
from apfl.files import hold
from tests.data.pictures import folder_of_images, pixels, saved_dataset, toy_backbone, toy_samples
from tests.data.test_images import finish, kill_when_saved, spoil, start

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="decoding processes need Linux")

CHILD = """
import os, sys, time
from pathlib import Path
from tests.data.pictures import toy_backbone, toy_samples
from apfl.data.extract.features import extract
path, n, pause, side, workers = Path(sys.argv[1]), *map(float, sys.argv[2:6])
(path.parent / "parent").write_text(str(os.getpid()))
done = extract(
    toy_samples(int(n), pause), toy_backbone(int(side)), path, batch_size=8, device="cpu", workers=int(workers),
    seconds_between_saves=0.05,
)
import resource
print(done.n_computed, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def children_of(parent: int) -> list[int]:
    """The processes that were started by another and still run."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def own_workers() -> set[int]:
    """The workers of this process: not the tracker of shared memory, which any test may have started before."""
    return {worker.pid for worker in multiprocessing.active_children() if worker.pid}


def source(kind: str, folder: Path) -> Samples:
    """36 images or more in every form they come in."""
    images, labels = np.stack([pixels(row) for row in range(40)]), np.arange(40) % 3
    if kind == "toy":
        return toy_samples()
    if kind == "folder":
        folder_of_images(folder / "images", each=12)
        opened = open_source(str(folder / "images"))
    elif kind == "saved":
        pytest.importorskip("datasets", reason="needs apfl[hub]")
        opened = open_source(str(saved_dataset(folder / "saved")))
    elif kind == "npy":
        np.save(folder / "x.npy", images)
        np.save(folder / "x.labels.npy", labels)
        opened = open_source(str(folder / "x.npy"))
    else:
        save = np.savez_compressed if kind == "compressed" else np.savez
        save(folder / "x.npz", images=images, labels=labels)
        opened = open_source(str(folder / "x.npz"))
    assert isinstance(opened, Samples)
    return opened


@pytest.mark.parametrize("kind", ["toy", "folder", "saved", "npy", "stored", "compressed"])
def test_processes_give_the_file_that_threads_give(tmp_path: Path, kind: str) -> None:
    samples, files = source(kind, tmp_path), [tmp_path / "threads.npz", tmp_path / "processes.npz"]
    for path, workers in zip(files, (0, 3), strict=True):
        extract(samples, toy_backbone(), path, batch_size=16, workers=workers)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert len(np.load(files[0])["features"]) == len(samples) >= 36


def tells_process() -> Backbone:
    """A network whose features are the number of the process that prepared the image."""
    return toy_backbone(prepare=lambda image: torch.tensor([float(os.getpid())]), forward=lambda batch: batch)


def test_other_processes_decode_and_this_one_does_not(tmp_path: Path) -> None:
    extract(toy_samples(), tells_process(), tmp_path / "f.npz", workers=3, batch_size=8)
    decoders = set(np.load(tmp_path / "f.npz")["features"][:, 0].tolist())
    assert len(decoders) == 3
    assert os.getpid() not in decoders
    extract(toy_samples(), tells_process(), tmp_path / "g.npz", device="cpu")
    assert set(np.load(tmp_path / "g.npz")["features"][:, 0].tolist()) == {os.getpid()}


def test_the_callers_random_numbers_stay_the_same() -> None:
    samples, backbone = toy_samples(8), toy_backbone()
    before = torch.get_rng_state()
    for workers in (0, 2):
        batching = Batching(torch.device("cpu"), start=0, size=4, mixed_precision=False, workers=workers)
        assert len(list(through(samples, backbone, batching))) == 2
        assert torch.equal(torch.get_rng_state(), before)


def test_unreadable_images_have_their_path_from_processes_too(tmp_path: Path) -> None:
    root = folder_of_images(tmp_path / "images")
    bad = spoil(root)
    samples = open_source(str(root))
    with pytest.raises(InputError, match=f"cannot read {bad[0]}: .*--on-corrupt skip"):
        extract(samples, toy_backbone(), tmp_path / "f.npz", batch_size=4, workers=2)
    for path, workers in ((tmp_path / "f.npz", 2), (tmp_path / "g.npz", 0)):
        result = extract(samples, toy_backbone(), path, batch_size=4, workers=workers, on_corrupt="skip")
        assert list(result.skipped) == [str(file) for file in bad]
    assert (tmp_path / "f.npz").read_bytes() == (tmp_path / "g.npz").read_bytes()


def test_the_first_image_need_not_be_readable(tmp_path: Path) -> None:
    """By its size the others are divided among the workers."""
    samples = toy_samples(fetch=lambda row: pixels(row) if row else b"")
    result = extract(samples, toy_backbone(), tmp_path / "f.npz", batch_size=8, workers=2, on_corrupt="skip")
    assert (result.n_rows, list(result.skipped)) == (39, ["toy row 0"])


def test_images_of_different_sizes_are_refused(tmp_path: Path) -> None:
    """In one chunk, and in two of one batch."""
    sides = [8] * 4 + [9] * 4
    samples = toy_samples(8, fetch=lambda row: pixels(row, height=sides[row]))
    backbone = toy_backbone(prepare=lambda image: torch.zeros(3, image.height, 8))
    for workers in (0, 1, 2):
        with pytest.raises(InputError, match=r"prepares images .*to different sizes; resize them"):
            extract(samples, backbone, tmp_path / "f.npz", batch_size=8, workers=workers)


def test_a_killed_extraction_leaves_neither_lock_nor_workers(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole.npz", tmp_path / "broken.npz"
    reference = start(whole, 300, 0, 16, 0, code=CHILD)
    finish(reference)
    process = start(broken, 300, 0.02, 16, 2, code=CHILD)
    until = time.monotonic() + 60
    while len(workers := children_of(process.pid)) < 2:
        assert time.monotonic() < until
        time.sleep(0.01)
    saved = kill_when_saved(process, broken, 0, 300)
    hold(tmp_path / ".broken.npz.partial" / "rows.f32").close()  # its workers still run, and hold nothing
    n_computed, _ = finish(start(broken, 300, 0, 16, 2, code=CHILD))
    assert n_computed == 300 - saved
    assert broken.read_bytes() == whole.read_bytes()
    while any(Path(f"/proc/{worker}").exists() for worker in workers):
        assert time.monotonic() < until, "a worker outlives the process that it works for"
        time.sleep(0.1)


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSEGV, marks=pytest.mark.slow)])
def test_a_worker_that_dies_is_said_and_costs_nothing(tmp_path: Path, number: signal.Signals) -> None:
    whole, path = tmp_path / "whole.npz", tmp_path / "f.npz"
    extract(toy_samples(120), toy_backbone(), whole, batch_size=4)

    def kill_one(done: int, total: int) -> None:
        if done == 16:
            os.kill(min(own_workers() - others), number)
            time.sleep(0.2)

    options = {"batch_size": 4, "workers": 2, "seconds_between_saves": 0.0}
    others = own_workers()
    with pytest.raises(InputError, match=rf"images died \({signal.strsignal(number)}\) at toy row \d+"):
        extract(toy_samples(120, pause=0.01), toy_backbone(), path, on_progress=kill_one, **options)  # type: ignore
    assert extract(toy_samples(120), toy_backbone(), path, **options).n_computed <= 120 - 16  # type: ignore[arg-type]
    assert path.read_bytes() == whole.read_bytes()
    assert own_workers() <= others


def test_a_worker_that_leaves_by_itself_is_said(tmp_path: Path) -> None:
    def leave(row: int) -> np.ndarray:
        if row == 20:
            os._exit(3)
        return pixels(row)

    with pytest.raises(InputError, match=r"images died \(exit code 3\) at toy row .*resumes, with --workers 0"):
        extract(toy_samples(fetch=leave), toy_backbone(), tmp_path / "f.npz", batch_size=4, workers=2)


def test_ctrl_c_in_a_terminal_reaches_all_processes_and_loses_nothing(tmp_path: Path) -> None:
    folder_of_images(tmp_path / "images", each=300)
    (tmp_path / "slow.py").write_text(
        "import time\nfrom tests.data.pictures import toy_backbone\n"
        "def load(*, pooling=None):\n    toy = toy_backbone()\n"
        "    return toy_backbone(prepare=lambda image: time.sleep(0.02) or toy.prepare(image))\n"
    )
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)])}
    command = [sys.executable, "-m", "apfl.cli", "features", "images", "--backbone", "./slow.py:load", "--out", "f.npz"]
    process = subprocess.Popen(
        [*command, "--workers", "2", "--batch-size", "8", "--device", "cpu"], cwd=tmp_path, env=environment,
        start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    until = time.monotonic() + 60
    while not (tmp_path / ".f.npz.partial" / "state.json").exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 130
    assert said.strip() == "stopped; run the same command again to resume."


def room_of(n_bytes: int) -> Callable[[Path], SimpleNamespace]:
    return lambda _: SimpleNamespace(f_bavail=n_bytes, f_frsize=1)


@pytest.mark.parametrize(
    ("free", "expected"),
    [
        (1 << 40, (32, 4)),  # the longest chunk
        (2 * 2 * 4 * 5 * 3072, (5, 4)),  # half of it for 2 chunks of each of 4 workers
        (2 * 2 * 3 * 3072, (1, 3)),  # fewer workers
        (1000, (64, 0)),  # none: this process decodes whole batches
    ],
)
def test_what_waits_fits_into_the_shared_memory(
    monkeypatch: pytest.MonkeyPatch, free: int, expected: tuple[int, int]
) -> None:
    monkeypatch.setattr(decode.os, "statvfs", room_of(free))
    samples, backbone = toy_samples(1000), toy_backbone(side=16)  # 3 x 16 x 16 numbers of 4 bytes
    assert decode._division(Reader(samples, backbone), torch.device("cpu"), 0, 64, 4) == expected


def test_the_default_number_of_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "n_cores", lambda: 16)
    cpu, gpu = torch.device("cpu"), torch.device("cuda")

    def division(samples: Samples, device: torch.device, workers: int | None = None) -> tuple[int, int]:
        return decode._division(Reader(samples, toy_backbone()), device, 0, 128, workers)

    assert division(toy_samples(4000), gpu) == (32, 15)
    assert division(toy_samples(60), gpu) == (4, 15)  # every worker has something to do
    assert division(toy_samples(4), gpu) == (1, 4)
    assert division(toy_samples(4000), cpu) == (128, 0)
    assert division(toy_samples(4000), gpu, 0) == (128, 0)
    assert division(replace(toy_samples(4000), kind="texts"), gpu) == (128, 0)
    with pytest.raises(InputError, match="--workers 2 given, but toy holds texts, not images"):
        division(replace(toy_samples(4000), kind="texts"), gpu, 2)
    with pytest.raises(InputError, match="--workers -1 given; it must be at least 0"):
        division(toy_samples(), cpu, -1)
    monkeypatch.setattr(sys, "platform", "darwin")
    assert division(toy_samples(4000), gpu) == (128, 0)
    with pytest.raises(InputError, match="--workers 2 given, but decoding processes need Linux"):
        division(toy_samples(), cpu, 2)


def test_memory_of_the_workers_does_not_grow_with_the_number_of_images(tmp_path: Path) -> None:
    few, many = (start(tmp_path / f"{n}.npz", n, 0, 160, 2, code=CHILD) for n in (64, 640))
    (_, kilobytes_few), (_, kilobytes_many) = finish(few), finish(many)
    held_by_all = 640 * 3 * 160 * 160 * 4 / 1000  # were they all kept: 197 MB
    assert kilobytes_many - kilobytes_few < 0.25 * held_by_all
