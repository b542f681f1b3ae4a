"""Where images and vectors come from, and what is said when they cannot be had."""

from __future__ import annotations

import hashlib
import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from apfl.data import Samples, load_dataset, open_source
from apfl.data.samples import decode
from apfl.data.sources import folder
from apfl.errors import InputError
from apfl.experiments.run import Protocol, federate
from tests.data.pictures import folder_of_images, pixels, saved_dataset


def images(source: Path | str, **options: object) -> Samples:
    opened = open_source(str(source), **options)
    assert isinstance(opened, Samples)
    return opened


def test_a_folder_names_classes_and_domains(tmp_path: Path) -> None:
    root = folder_of_images(tmp_path / "pacs", classes=2, each=3, domains=("art", "photo"))
    (root / "art" / "class0" / "notes.txt").write_text("not an image")
    (root / ".hidden").mkdir()
    samples = images(root)
    assert samples.class_names == ("class0", "class1")
    assert samples.labels.tolist() == [0, 0, 0, 1, 1, 1] * 2
    assert samples.columns["domain"].tolist() == ["art"] * 6 + ["photo"] * 6
    assert samples.columns["path"][4] == "art/class1/001.png"
    np.testing.assert_array_equal(np.asarray(samples.decode(samples.fetch(4))), pixels(101, colour=1))


def test_a_folders_revision_changes_with_any_file(tmp_path: Path) -> None:
    root = folder_of_images(tmp_path / "images")
    before = images(root).revision
    assert images(root).revision == before
    Image.fromarray(pixels(999, height=30)).save(root / "class1" / "002.png")
    assert images(root).revision != before


@pytest.mark.parametrize("suffix", ["png", "jpg", "bmp", "gif", "tiff", "webp", "ppm"])
def test_every_format_and_mode_becomes_rgb(tmp_path: Path, suffix: str) -> None:
    Image.fromarray(pixels(0)).save(tmp_path / f"a.{suffix}")
    image = decode(tmp_path / f"a.{suffix}")
    assert (image.mode, image.size) == ("RGB", (32, 24))


def test_modes_that_pillow_would_spoil(tmp_path: Path) -> None:
    ramp = np.linspace(0, 65535, 256).reshape(16, 16).astype(np.uint16)
    Image.fromarray(ramp).save(tmp_path / "deep.png")
    np.testing.assert_array_equal(np.asarray(decode(tmp_path / "deep.png"))[..., 0], ramp >> 8)
    palette = Image.fromarray(pixels(0)).quantize(16)
    palette.save(tmp_path / "palette.png", transparency=bytes(range(16)))
    assert decode(tmp_path / "palette.png").mode == "RGB"
    turned = Image.fromarray(pixels(0, height=10, width=20))
    exif = turned.getexif()
    exif[0x0112] = 6  # orientation: lies on its side
    turned.save(tmp_path / "turned.jpg", exif=exif)
    assert decode(tmp_path / "turned.jpg").size == (10, 20)
    Image.fromarray(np.ones((4, 4), np.float32)).save(tmp_path / "float.tiff")
    with pytest.raises(InputError, match="32-bit"):
        decode(tmp_path / "float.tiff")


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_images_in_an_npz_are_read_row_by_row(tmp_path: Path, save: object) -> None:
    stack = np.stack([pixels(i) for i in range(7)])
    save(tmp_path / "a.npz", images=stack, labels=np.arange(7) % 2, site=np.arange(7))  # type: ignore[operator]
    samples = images(tmp_path / "a.npz")
    for row in (0, 1, 5, 2):  # also backwards
        np.testing.assert_array_equal(np.asarray(samples.decode(samples.fetch(row))), stack[row])
    assert samples.columns["site"].tolist() == list(range(7))


def test_an_npy_has_its_labels_beside_it(tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).standard_normal((5, 3)).astype(np.float32)
    np.save(tmp_path / "x.npy", vectors)
    with pytest.raises(InputError, match=r"x\.labels\.npy or labels\.npy"):
        open_source(str(tmp_path / "x.npy"))
    np.save(tmp_path / "x.labels.npy", np.array(["b", "a", "b", "a", "a"]))
    dataset = load_dataset(str(tmp_path / "x.npy"))
    np.testing.assert_array_equal(dataset.features.numpy(), vectors)
    assert dataset.labels.tolist() == [1, 0, 1, 0, 0]
    np.save(tmp_path / "x.npy", np.stack([pixels(i) for i in range(5)]))
    samples = images(tmp_path / "x.npy")
    np.testing.assert_array_equal(np.asarray(samples.decode(samples.fetch(3))), pixels(3))


@pytest.mark.parametrize("name", ["x.labels.npy", "labels.npy"])
@pytest.mark.parametrize("values", [np.ones((5, 3), np.float32), np.stack([pixels(i) for i in range(5)])])
def test_an_npy_with_other_labels_is_other_data(tmp_path: Path, name: str, values: np.ndarray) -> None:
    def identity() -> str | None:
        opened = open_source(str(tmp_path / "x.npy"))
        return opened.revision if isinstance(opened, Samples) else opened.sha256

    np.save(tmp_path / "x.npy", values)
    np.save(tmp_path / name, np.array([1, 0, 1, 0, 0]))
    before = identity()
    assert identity() == before
    np.save(tmp_path / name, np.array([1, 0, 1, 0, 1]))
    assert identity() != before
    np.save(tmp_path / name, np.array([1, 0, 1, 0, 0]))
    assert identity() == before
    np.save(tmp_path / "x.npy", values + values)
    assert identity() != before


def test_the_identity_of_one_file_is_its_hash(tmp_path: Path) -> None:
    file = tmp_path / "a.npz"
    np.savez(file, features=np.ones((2, 3)), labels=np.arange(2))
    assert load_dataset(str(file)).sha256 == hashlib.sha256(file.read_bytes()).hexdigest()
    np.savez(file, images=np.stack([pixels(0), pixels(1)]), labels=np.arange(2))
    assert images(file).revision == hashlib.sha256(file.read_bytes()).hexdigest()


def table(tmp_path: Path, kind: str) -> tuple[Path, np.ndarray]:
    arrow = pytest.importorskip("pyarrow", reason="needs apfl[tables]")
    vectors = np.random.default_rng(0).standard_normal((24, 12)).astype(np.float32)
    columns = {
        "species": ["oak", "elm"] * 12,
        "site": [f"s{i % 3}" for i in range(24)],
        "patient": [i // 2 for i in range(24)],
        "split": ["train", "train", "train", "test"] * 6,
    }
    path = tmp_path / f"embeddings.{kind}"
    if kind == "csv":
        import pyarrow.csv

        # The tenth column must come after the ninth, not after the first.
        numbered = {f"f{j}": vectors[:, j] for j in np.random.default_rng(1).permutation(12)}
        pyarrow.csv.write_csv(arrow.table(columns | numbered), path)
    else:
        import pyarrow.parquet

        pyarrow.parquet.write_table(arrow.table(columns | {"embedding": list(vectors)}), path)
    return path, vectors


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_table_gives_vectors_clients_groups_and_splits(tmp_path: Path, kind: str) -> None:
    path, vectors = table(tmp_path, kind)
    dataset = load_dataset(str(path), label_column="species")
    np.testing.assert_allclose(dataset.features.numpy(), vectors, rtol=1e-6)  # CSV holds decimal digits
    assert dataset.class_names == ("elm", "oak")
    federation = federate(dataset, Protocol("given", None, client_column="site", test_column="split"), seed=0)
    assert list(federation.names) == ["s0", "s1", "s2"]
    assert sum(len(shard) for shard in federation.test) == 6
    grouped = federate(dataset, Protocol("given", None, client_column="site", group_column="patient"), seed=0)
    assert grouped.train[0].groups is not None


def test_the_chosen_columns_are_part_of_what_the_data_are(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="needs apfl[tables]")
    file = tmp_path / "own.csv"

    def identity(**options: str) -> str | None:
        return load_dataset(str(file), **options).sha256

    file.write_text("label,species,f0,f1\n1,oak,1,2\n2,elm,3,4\n")
    plain = hashlib.sha256(file.read_bytes()).hexdigest()
    # A column that would be chosen anyway is the same choice, whether it is named or not.
    assert identity() == identity(label_column="label") == identity(feature_column="f") == plain
    assert identity(label_column="species") == identity(label_column="species", feature_column="f") != plain
    file.write_text("label,species,f0,f1,g0\n1,oak,1,2,5\n2,elm,3,4,6\n")
    choices = [(label, feature) for label in ("label", "species") for feature in "fg"]
    assert len({identity(label_column=label, feature_column=feature) for label, feature in choices}) == 4
    before = identity(feature_column="f")
    assert before == identity(feature_column="f", label_column="label")
    file.write_text(file.read_text().replace("6", "7"))
    assert identity(feature_column="f") != before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"no column 'label' \(it has: .*species"),
        (
            {"label_column": "f3", "target": "classification"},
            "labels in 'f3' are float64, for example .*; expected integers or strings",
        ),
        ({"label_column": "species", "feature_column": "g"}, "numbered columns: f"),
        ({"label_column": "species", "revision": "main"}, "--revision given, which is of no use"),
    ],
)
def test_a_table_that_does_not_fit(tmp_path: Path, options: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load_dataset(str(table(tmp_path, "csv")[0]), **options)


def test_tables_that_are_damaged(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="needs apfl[tables]")
    broken, gaps, bare = tmp_path / "a.parquet", tmp_path / "b.csv", tmp_path / "c.csv"
    broken.write_bytes(b"PAR1 no more")
    gaps.write_text("label,f0\n1,0.5\n,0.25\n")
    bare.write_text("label,f0\n1,0.5\n2,\n")
    for path, message in ((broken, "cannot be read as parquet"), (gaps, "1 of 2 values"), (bare, "NaN")):
        with pytest.raises(InputError, match=message):
            load_dataset(str(path))


def with_gaps(tmp_path: Path, kind: str) -> Path:
    """Four rows; every column but the features has a gap somewhere, and one says 'nan' without being one."""
    arrow = pytest.importorskip("pyarrow", reason="needs apfl[tables]")
    path = tmp_path / f"gaps.{kind}"
    if kind == "csv":
        path.write_text(
            "species,sound,hospital,patient,held,nobody,said,f0,f1\n"
            "oak,a,north,1,true,,nan,1,2\n,b,,2,false,,x,3,4\nelm,c,south,,,,y,5,6\nelm,a,north,4,true,,y,7,8\n"
        )
        return path
    import pyarrow.parquet

    columns = {
        "species": ["oak", None, "elm", "elm"], "sound": ["a", "b", "c", "a"], "hospital": ["north", "", "south", None],
        "patient": [1, 2, None, 4], "held": [True, False, None, True], "nobody": [None] * 4,
        "said": ["nan", "x", "y", "y"], "dose": [0.5, float("nan"), 1.0, 2.0], "lists": [[1], [1, 2], [], None],
        "f": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]],
    }  # fmt: skip
    pyarrow.parquet.write_table(arrow.table(columns), path)
    return path


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_missing_label_is_refused_with_its_row(tmp_path: Path, kind: str) -> None:
    path = with_gaps(tmp_path, kind)
    counted = r" \(row 0 follows the header\)" if kind == "csv" else ""
    message = rf"1 of 4 values in column 'species' of .*gaps.{kind}{counted} is missing \(row 1, counted from 0\)"
    with pytest.raises(InputError, match=message):
        load_dataset(str(path), label_column="species", feature_column="f")
    with pytest.raises(InputError, match=r"'patient' .*row 2, "):
        load_dataset(str(path), label_column="patient", feature_column="f")
    with pytest.raises(InputError, match=r"4 of 4 values in column 'nobody'"):
        load_dataset(str(path), label_column="nobody", feature_column="f")
    assert load_dataset(str(path), label_column="said", feature_column="f").class_names == ("nan", "x", "y")


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_columns_with_gaps_are_refused_only_if_they_are_used(tmp_path: Path, kind: str) -> None:
    dataset = load_dataset(str(with_gaps(tmp_path, kind)), label_column="sound", feature_column="f")
    missing = {"species": "1", "hospital": "1" if kind == "csv" else "1, 3", "patient": "2", "held": "2"}
    missing |= {"nobody": "0, 1, 2, 3"} | ({"dose": "1"} if kind == "parquet" else {})
    assert set(dataset.columns) == {*missing, "said"}
    assert dataset.column("said").tolist() == ["nan", "x", "y", "y"]
    for name, rows in missing.items():
        with pytest.raises(InputError, match=rf"column '{name}' of gaps.{kind}.* \(rows? {rows}, counted from 0\)"):
            dataset.column(name)


@pytest.mark.parametrize(
    ("labels", "names", "rows"),
    [
        (np.array(["a", "", "b", ""]), None, "rows 1, 3"),
        (np.array([b"a", b"b", b"", b"a"]), None, "row 2"),
        (np.array([0, 1, np.nan, 1]), None, "row 2"),
        (np.array(["a", "b", "", "a"]), ["a", "b"], "row 2"),
        (np.array([0, 1, 2, 1]), ["a", "b", ""], "row 2"),
    ],
)
def test_missing_labels_in_arrays_are_refused(tmp_path: Path, labels, names, rows: str) -> None:
    named = {} if names is None else {"class_names": names}
    np.savez(tmp_path / "a.npz", features=np.eye(4), labels=labels, **named)
    np.savez(tmp_path / "b.npz", images=np.zeros((4, 2, 2), np.uint8), labels=labels, **named)
    np.save(tmp_path / "c.npy", np.eye(4))
    np.save(tmp_path / "c.labels.npy", labels)
    for source in ["a.npz", "b.npz", *([] if names else ["c.npy"])]:
        with pytest.raises(InputError, match=rf"of 4 labels of .*{source}.* missing \({rows}, counted from 0\)"):
            open_source(str(tmp_path / source))


def test_a_class_name_that_no_row_has_may_be_empty(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", features=np.eye(3), labels=[0, 1, 1], class_names=["a", "b", ""])
    assert load_dataset(str(tmp_path / "a.npz")).class_names == ("a", "b", "")


def test_missing_labels_and_columns_of_a_saved_dataset(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="needs apfl[hub]")
    rows = {
        "image": [Image.fromarray(pixels(i)) for i in range(3)], "label": ["a", None, "b"], "whole": ["a", "b", "b"],
        "site": ["x", None, "y"], "age": [1, None, 3],
    }  # fmt: skip
    made = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    made.save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(InputError, match=r"1 of 3 values in column 'label' of saved is missing \(row 1,"):
        images(tmp_path / "saved", image_column="image", label_column="label")
    samples = images(tmp_path / "saved", image_column="image", label_column="whole")
    assert samples.columns["site"].tolist() == ["x", "", "y"]
    assert np.isnan(samples.columns["age"][1])


@pytest.mark.parametrize("kind", ["csv", "parquet", "npz"])
def test_features_too_large_for_float32_are_refused(tmp_path: Path, kind: str) -> None:
    path, rows = tmp_path / f"large.{kind}", np.array([[1.0, 2.0], [3.0, 1e39], [1e30, -1e-30]])
    if kind == "npz":
        np.savez(path, features=rows, labels=[0, 1, 1])
    else:
        arrow = pytest.importorskip("pyarrow", reason="needs apfl[tables]")
        import pyarrow.csv
        import pyarrow.parquet

        write = pyarrow.csv.write_csv if kind == "csv" else pyarrow.parquet.write_table
        write(arrow.table({"label": [0, 1, 1], "f0": rows[:, 0], "f1": rows[:, 1]}), path)
    with pytest.raises(InputError, match=r"1 rows .* too large for float32; the first is row 1 \(counted from 0\)"):
        load_dataset(str(path))


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("label,f0,f1\n1,0.5,1\n2,0.5,oops\n", {}, r"own\.csv: column 'f1', row 1 holds 'oops'.*must be numbers"),
        ("label,f0,f1\n1,0.5,\n2,0.5,\n", {}, "column 'f1', row 0 holds nothing"),
        ("label,f0,f1\n1,0.5,true\n2,0.5,false\n", {}, "column 'f1', row 0 holds True"),
        ("label,f0,f1,g0\n1,2,x,1\n2,2,3,1\n", {"feature_column": "f"}, "column 'f1', row 0 holds 'x'"),
        ("label,f0,site1\n1,2,x\n2,2,y\n", {"feature_column": "site"}, "column 'site1', row 0 holds 'x'"),
    ],
)
def test_no_feature_of_a_table_is_lost(tmp_path: Path, text: str, options: dict[str, str], message: str) -> None:
    pytest.importorskip("pyarrow", reason="needs apfl[tables]")
    (tmp_path / "own.csv").write_text(text)
    with pytest.raises(InputError, match=message):
        load_dataset(str(tmp_path / "own.csv"), **options)


def test_numbered_columns_of_words_are_no_features_unless_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="needs apfl[tables]")
    (tmp_path / "own.csv").write_text("label,f0,f1,site1\na,1,2,x\nb,3,4,y\n")
    dataset = load_dataset(str(tmp_path / "own.csv"))
    assert dataset.features.tolist() == [[1, 2], [3, 4]]
    assert dataset.column("site1").tolist() == ["x", "y"]


@pytest.mark.parametrize("header", ["label,f0,f0,site,f1,site", "label,f0,f1,site,label,f0", ",f0,,label,x,y,"])
def test_columns_of_one_name_are_refused(tmp_path: Path, header: str) -> None:
    pytest.importorskip("pyarrow", reason="needs apfl[tables]")
    names = header.split(",")
    (tmp_path / "own.csv").write_text("\n".join([header, *(",".join([str(row)] * len(names)) for row in range(3))]))
    twice = ", ".join(repr(name) for name in dict.fromkeys(names) if names.count(name) > 1)
    with pytest.raises(InputError, match=rf"own\.csv has several columns of the name {twice}; ") as caught:
        load_dataset(str(tmp_path / "own.csv"))
    assert "\n" not in str(caught.value)


def test_columns_of_one_name_are_refused_in_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="needs apfl[tables]")
    import pyarrow.parquet

    columns = [arrow.array([1, 2])] * 3
    pyarrow.parquet.write_table(arrow.table(columns, names=["label", "f0", "f0"]), tmp_path / "own.parquet")
    with pytest.raises(InputError, match=r"own\.parquet has several columns of the name 'f0'; "):
        load_dataset(str(tmp_path / "own.parquet"))


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_columns_of_a_table_are_columns_whatever_they_are_called(tmp_path: Path, kind: str) -> None:
    arrow = pytest.importorskip("pyarrow", reason="needs apfl[tables]")
    others = {name: ["x", "y", "z"] for name in ("class_names", "provenance", "features", "labels", "images")}
    columns = {"label": ["b", "a", "b"], "f0": [1, 3, 5], "f1": [2, 4, 6], "scale": [0.5, 7.0, 9.0], **others}
    file = tmp_path / f"own.{kind}"
    writer = importlib.import_module(f"pyarrow.{kind}")
    (writer.write_csv if kind == "csv" else writer.write_table)(arrow.table(columns), file)
    dataset = load_dataset(str(file))
    assert dataset.features.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert dataset.class_names == ("a", "b")
    assert {name: column.tolist() for name, column in dataset.columns.items()} == {"scale": [0.5, 7, 9], **others}
    assert dataset.provenance == {}


def test_a_saved_dataset_loads_offline_with_its_splits(tmp_path: Path, no_network: Path) -> None:
    pytest.importorskip("datasets", reason="needs apfl[hub]")
    folder = saved_dataset(tmp_path / "saved")
    samples = images(folder)
    assert samples.settings == {"splits": ["train", "test"], "image_column": "img", "label_column": "fine_label"}
    assert samples.columns["split"].tolist() == ["train"] * 40 + ["test"] * 20
    assert samples.labels.tolist() == [i % 3 for i in range(60)]
    assert samples.where(41).endswith("split test, row 1")
    np.testing.assert_array_equal(np.asarray(samples.decode(samples.fetch(41))), pixels(41, colour=2))
    only = images(folder, splits=["test"])
    assert len(only) == 20
    assert only.revision != samples.revision
    for options, message in (
        ({"splits": ["validation"]}, r"no split in saved 'validation'\. \(have: test, train\)"),
        ({"image_column": "fine_label"}, "not images"),
        ({"label_column": "img"}, "expected integers or strings"),
        ({"label_column": "species"}, r"no column 'species' \(it has: img \(Image\), fine_label \(ClassLabel\)\)"),
    ):
        with pytest.raises(InputError, match=message):
            images(folder, **options)


def test_a_preset_is_found_in_the_folder_the_error_names(no_network: Path) -> None:
    pytest.importorskip("datasets", reason="needs apfl[hub]")
    with pytest.raises(InputError) as caught:
        open_source("cifar100")
    folder = no_network / "datasets" / "uoft-cs--cifar100"
    assert f"`hf download uoft-cs/cifar100 --repo-type dataset --local-dir {folder}`" in str(caught.value)
    saved_dataset(folder)
    assert images("cifar100").settings["splits"] == ["train", "test"]
    # The columns of this one were recalled, not seen: if they differ, those found are named.
    saved_dataset(no_network / "datasets" / "axiong--imagenet-r", label="renamed")
    with pytest.raises(InputError, match=r"no column 'image' \(it has: img \(Image\), renamed \(ClassLabel\)\)"):
        open_source("imagenet-r")


def test_a_clone_of_a_hub_dataset_is_as_good(no_network: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="needs apfl[hub]")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", no_network / "arrow")
    saved = datasets.load_from_disk(str(saved_dataset(no_network / "saved")))
    clone = no_network / "datasets" / "uoft-cs--cifar100" / "data"
    clone.mkdir(parents=True)
    for split, rows in saved.items():
        rows.to_parquet(clone / f"{split}-00000-of-00001.parquet")
    samples = images("cifar100")
    assert samples.columns["split"].tolist() == ["train"] * 40 + ["test"] * 20
    np.testing.assert_array_equal(np.asarray(samples.decode(samples.fetch(41))), pixels(41, colour=2))


@pytest.mark.parametrize(
    ("module", "source", "extra"), [("datasets", "cifar100", "hub"), ("pyarrow", "x.csv", "tables")]
)
def test_a_missing_library_names_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, source: str, extra: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("x.csv").write_text("label,f0\na,1\n")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=rf"pip install 'apfl\[{extra}\]'"):
        open_source(source)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: (root / "a").mkdir(), "holds no images"),
        (lambda root: folder_of_images(root / "x" / "y" / "z"), "holds no images"),
        (lambda root: (folder_of_images(root), folder_of_images(root / "art")), "different depths"),
    ],
)
def test_folders_that_are_no_datasets(tmp_path: Path, make: object, message: str) -> None:
    make(tmp_path)  # type: ignore[operator]
    with pytest.raises(InputError, match=message):
        open_source(str(tmp_path))


def test_a_folder_that_may_not_be_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "closed").mkdir()

    def refuse(self: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "is_file", refuse)
    with pytest.raises(InputError, match=r"cannot look into .*closed: Permission denied"):
        folder.load(str(tmp_path))
