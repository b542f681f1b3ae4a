"""Noise on the command line: what is refused, and what a site is told before it joins."""

from __future__ import annotations

import numpy as np
import pytest

from tests.commands import here as apfl
from tests.federate.federation_toys import NAMES, draw_shard
from tests.federate.private.toys import need_accounting, private_terms

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'apfl[flower]'")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--epsilon", "4", "--set", "normalise=root"], "without class_names, n_features, max_rows given"),
        (["--delta", "1e-6"], "--delta given without --epsilon"),
        (["--colluders", "1"], "--colluders given without --epsilon"),
        (["--epsilon", "4"], "epsilon with normalise='auto' and landmarks='free' given"),
        (["--epsilon", "0", "--set", "normalise=root"], "apfl.epsilon=0"),
        (["--epsilon", "4", "--set", "normalise=root", "--set", "landmarks=federation"], "no moments are released"),
        (["--epsilon", "4", "--set", "normalise=root", "--releases", "0"], "releases"),
    ],
)
def test_what_a_server_refuses(tmp_path, capsys, options, sentence):
    need_accounting()
    assert apfl("federate", "server", tmp_path / "server", *options) == 2
    assert sentence in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "server" / "ledger.sqlite").exists()


def test_a_site_is_told_what_leaves_and_with_which_noise(tmp_path, capsys):
    rows = draw_shard(30, 1)
    data, terms = tmp_path / "rows.npz", tmp_path / "terms.json"
    np.savez(data, features=rows.features.numpy(), labels=rows.labels.numpy(), class_names=np.array(NAMES))
    terms.write_text(private_terms().to_json())
    options = ("--server", "localhost:1", "--name", "a", "--data", data, "--terms", terms, "--folder", tmp_path / "a")
    assert apfl("federate", "join", *options, "--show-what-leaves") == 0
    told = capsys.readouterr().err
    assert "You trust the server with these sums: they have no noise yet" in told
    assert "epsilon 4 with delta 1e-05 over one sum" in told
    assert "how many repeat" not in told
