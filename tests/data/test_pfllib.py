"""Federations that PFLlib wrote, read without trusting them."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from sklearn.datasets import load_digits

from apfl.data import Samples, load_dataset, open_source
from apfl.errors import InputError
from apfl.experiments.run import Protocol, federate


def write_pfllib(folder, clients):
    """As PFLlib's save_file does."""
    for side in ("train", "test"):
        (folder / side).mkdir(parents=True)
    for k, (train, test) in enumerate(clients):
        for side, (x, y) in (("train", train), ("test", test)):
            with (folder / side / f"{k}.npz").open("wb") as file:
                np.savez_compressed(file, data={"x": x, "y": y})
    config = {"num_clients": len(clients), "num_classes": 10, "non_iid": True, "balance": False, "partition": "dir"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def clients():
    X, y = load_digits(return_X_y=True)
    parts = np.array_split(np.random.default_rng(0).permutation(240), 3)
    return [((X[p[:60]], y[p[:60]]), (X[p[60:]], y[p[60:]])) for p in parts]


def test_a_federation_of_vectors_comes_out_as_it_was_dealt(tmp_path, clients):
    dataset = load_dataset(str(write_pfllib(tmp_path / "Digits", clients)))
    protocol = Protocol("given", None, client_column="client", test_column="test")
    federation = federate(dataset, protocol, seed=0)
    assert list(federation.names) == ["0", "1", "2"]
    for (train, test), ours, our_test in zip(clients, federation.train, federation.test, strict=True):
        assert np.array_equal(ours.features.numpy(), train[0].astype(np.float32))
        assert np.array_equal(ours.labels.numpy(), train[1])
        assert np.array_equal(our_test.labels.numpy(), test[1])
    assert dataset.sha256 != load_dataset(str(write_pfllib(tmp_path / "Other", clients[:2]))).sha256


def test_images_go_to_a_backbone_as_pixels(tmp_path):
    pixels = np.random.default_rng(0).integers(256, size=(4, 3, 5, 6), dtype=np.uint8)
    scaled = (pixels / 255 - 0.5).astype(np.float32) / 0.5  # torchvision's ToTensor and Normalize(0.5, 0.5)
    folder = write_pfllib(tmp_path / "Cifar", [((scaled[:3], np.arange(3)), (scaled[3:], np.arange(1)))])
    samples = open_source(str(folder))
    assert isinstance(samples, Samples)
    assert samples.columns["test"].tolist() == [False, False, False, True]
    assert np.array_equal(np.stack([samples.fetch(row) for row in range(4)]), pixels.transpose(0, 2, 3, 1))
    wild = write_pfllib(tmp_path / "Wild", [((3 * scaled, np.arange(4)), (scaled, np.arange(4)))])
    with pytest.raises(InputError, match="scaled to -1 to 1"):
        open_source(str(wild))


class Attack:
    def __reduce__(self):
        return os.mkdir, ("attacked",)


def test_a_pickle_that_would_run_something_is_refused(tmp_path, monkeypatch, clients):
    monkeypatch.chdir(tmp_path)
    (train, test), *others = clients
    folder = write_pfllib(tmp_path / "Digits", [((train[0], Attack()), test), *others])
    with pytest.raises(InputError, match=r"asks for posix\.mkdir; only arrays"):
        load_dataset(str(folder))
    assert not (tmp_path / "attacked").exists()


@pytest.mark.parametrize("damage", [b"", b"not a zip", b"PK\x03\x04"])
def test_damaged_clients_are_one_line(tmp_path, clients, damage):
    folder = write_pfllib(tmp_path / "Digits", clients)
    (folder / "test" / "1.npz").write_bytes(damage)
    with pytest.raises(InputError, match=r"1\.npz cannot be read"):
        load_dataset(str(folder))
    (folder / "config.json").write_text("{}")
    with pytest.raises(InputError, match="not PFLlib's"):
        load_dataset(str(folder))
    (folder / "config.json").write_text('{"num_clients": 0, "num_classes": 10}')
    with pytest.raises(InputError, match="has 0 clients and 10 classes; 1 or more"):
        load_dataset(str(folder))


def test_an_empty_name_is_not_the_folder_one_is_in():
    with pytest.raises(InputError, match="no data ''"):
        load_dataset("")
