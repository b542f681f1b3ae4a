"""Models on the Hugging Face Hub: what goes there comes back, and both the caller and the card say what it reveals."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from apfl import DualStream, InputError, random_map
from apfl.maths.landmarks import LandmarkMap
from apfl.maths.normalise import moments, normaliser
from apfl.models.hub import revealed
from apfl.models.landmark import LandmarkModel
from apfl.models.linear_head import LinearHead
from tests.models.fake_hub import hub, huggingface_hub  # skips without the extra

__all__ = ["hub"]  # a fixture

ROWS = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
MODEL = DualStream(
    random_map(3, 5, "relu", 0), torch.randn(5, 2, dtype=torch.float64), random_map(3, 4, "relu", 1),
    torch.randn(4, 2, dtype=torch.float64), 0.5, normaliser("row"), ("ill", "well"), 0.2,
    torch.tensor([0.1, -0.1], dtype=torch.float64), {"client": "St. Mary", "feature_names": ["age", "dose", "mass"]},
)  # fmt: skip


def test_a_model_goes_there_and_comes_back(hub, tmp_path):
    with pytest.warns(UserWarning, match=r"me/model will tell whoever may read this private repository: .*St\. Mary"):
        address = MODEL.push_to_hub("me/model", data="three wards", metrics={"accuracy": 0.91})
    assert address.endswith("commit/0123456789abcdef0123456789abcdef01234567")
    there = hub.repositories["me/model"]
    assert there.private
    assert sorted(there.files) == ["README.md", "model.safetensors"]
    back = DualStream.from_pretrained("me/model", cache_dir=tmp_path)
    torch.testing.assert_close(back.scores(ROWS), MODEL.scores(ROWS), rtol=0, atol=0)
    assert (back.about, back.temperature, list(back.class_names)) == (MODEL.about, 0.2, ["ill", "well"])
    with pytest.raises(InputError, match="kind 'dual-stream' given where 'linear-head' is needed"):
        LinearHead.from_pretrained("me/model", cache_dir=tmp_path)


def test_the_card_has_data_client_settings_privacy_metrics_and_the_warning(hub):
    with pytest.warns(UserWarning, match="me/model"):
        MODEL.push_to_hub("me/model", data="three wards", metrics={"accuracy": 0.91})
    card = hub.repositories["me/model"].files["README.md"].decode()
    assert huggingface_hub.ModelCard(card).data.library_name == "apfl"
    for part in (
        "| data | three wards |", "| client | St. Mary |", "| classes | 2: ill, well |", "| balance | 0.5 |",
        "| accuracy | 0.91 |", "age", "no differential privacy and no bound (epsilon, delta)",
        "**Before you share this: what the files reveal.** " + revealed(MODEL), "how often the client has each class",
        "DualStream.from_pretrained",
    ):  # fmt: skip
        assert part in card, part


def test_nothing_is_public_unless_it_is_said_twice(hub):
    with pytest.warns(UserWarning, match="will tell EVERYBODY, because private=False: "):
        MODEL.push_to_hub("me/open", private=False)
    assert not hub.repositories["me/open"].private
    before = dict(hub.repositories["me/open"].files)
    with pytest.raises(InputError, match="the repository me/open is public"):
        replace(MODEL, balance=0.0).push_to_hub("me/open")
    assert hub.repositories["me/open"].files == before


def test_names_cannot_break_the_card(tmp_path):
    strange = replace(MODEL, about={"client": "a | b\n## Metrics\n<script>"})
    strange.save_pretrained(tmp_path / "m")
    card = (tmp_path / "m" / "README.md").read_text()
    assert "| client | a \\| b ## Metrics &lt;script> |" in card
    assert card.count("\n## Metrics\n") == 1


@pytest.mark.parametrize(
    "model",
    [
        MODEL,
        LandmarkModel(LandmarkMap(torch.eye(3, dtype=torch.int8), torch.ones(3)), torch.eye(3, dtype=torch.float64)),
        LinearHead(torch.eye(3), torch.zeros(3), normaliser=normaliser("columns", moments(ROWS[:, :2]))),
    ],
)
def test_a_folder_holds_any_model(model, tmp_path):
    model.save_pretrained(tmp_path / "m")
    model.save_pretrained(tmp_path / "m", data="the second time")
    back = type(model).from_pretrained(tmp_path / "m")
    rows = ROWS[:, : 2 if isinstance(model, LinearHead) else 3]
    torch.testing.assert_close(back.scores(rows), model.scores(rows), rtol=0, atol=0)
    assert "the second time" in (tmp_path / "m" / "README.md").read_text()


def test_what_is_revealed_is_what_is_in_the_file():
    alone = DualStream(MODEL.primary_map, MODEL.primary, normaliser=normaliser("standardise", moments(ROWS)))
    assert "mean and spread of every feature" in revealed(alone)
    for part in ("client's own rows", "how often", "name of its client", "names of the features"):
        assert part in revealed(MODEL)
        assert part not in revealed(alone)
