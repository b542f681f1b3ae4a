"""Texts to one vector each, by a language model: tokens, the model, pooling.

If the model is one of sentence-transformers, its files say how: ``modules.json`` lists what follows the model (pooling,
dense layers, normalisation), ``sentence_bert_config.json`` has the number of tokens, and
``config_sentence_transformers.json`` a text to put before each. Otherwise a vector is the mean over the tokens of a
text. Texts of like lengths share a pass through the model: padding costs as much as words.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from apfl.data.backbones import Backbone, weights_sha256
from apfl.data.hub_access import Repository, file_in
from apfl.errors import InputError

__all__ = ["sentence_encoder"]

PADDING = -1  # after the tokens of a text that is shorter than others of its batch
TOKENS = 8192  # of one pass through the model, padding included: bounds its memory
LONGEST = 512  # tokens of a text, if a model does not say how many it reads
ACTIVATIONS = {"Identity": nn.Identity, "Tanh": nn.Tanh, "ReLU": nn.ReLU, "GELU": nn.GELU}


class Tokens(NamedTuple):
    """One text."""

    ids: Tensor  # (t,), with those that the model wants at the beginning and at the end
    is_cut: bool  # whether the text went on


@dataclass(frozen=True)
class _Recipe:
    """How a model's tokens become one vector."""

    pooling: str  # cls or mean
    head: nn.Sequential  # what follows it
    name: str  # of all of it
    with_prompt: bool = True  # whether what is put before every text is pooled too


def sentence_encoder(
    name: str, model: Any, tokenizer: Any, place: Repository, pooling: str | None, missing: Collection[str]
) -> Backbone:
    """``pooling`` takes the model alone and pools its tokens so; None does as the model's files say.

    ``missing`` are weights that were drawn at random, and that do not matter.
    """
    tower = model.get_encoder() if getattr(model.config, "is_encoder_decoder", False) else model
    recipe = _Recipe(pooling, nn.Sequential(), pooling) if pooling else _read_recipe(name, place)
    module = nn.ModuleDict({"model": tower, "head": recipe.head}).eval().requires_grad_(False)
    settings = _read(place, "sentence_bert_config.json")
    limit = _limit(settings, tokenizer, tower)
    before = _prompt(name, place, recipe)
    lower = bool(settings.get("do_lower_case", False))
    pad = tokenizer.pad_token_id or 0
    preprocessing = {"tokenizer_sha256": _tokenizer_sha256(tokenizer), "max_length": limit}
    preprocessing |= ({"prompt": before} if before else {}) | ({"lower_case": True} if lower else {})
    return Backbone(
        name=name,
        takes="texts",
        weights=weights_sha256(module, without=[f"model.{key}" for key in missing]),
        preprocessing=preprocessing,
        pooling=recipe.name,
        module=module,
        prepare=_preparation(tokenizer, limit, before, lower),
        forward=partial(_forward, partial(_encoded, tower, recipe, pad)),
        combine=_padded,
        is_cut=lambda tokens: bool(tokens.is_cut),
    )


def _preparation(tokenizer: Any, limit: int, before: str, lower: bool) -> Callable[[str], Tokens]:
    """From texts to tokens. Without the tokenizer's own truncation, which threads must not switch on and off."""
    around = tokenizer("a", verbose=False, return_special_tokens_mask=True)["special_tokens_mask"]
    n_after = around[::-1].index(0) if 0 in around else 0  # tokens that end every text
    n_before = around.index(0) if 0 in around else 0
    if limit <= n_before + n_after:
        raise InputError(f"the model reads {limit} tokens, of which none is left for the text; choose another")

    def prepare(text: str) -> Tokens:
        ids = tokenizer(before + (text.lower() if lower else text), verbose=False)["input_ids"]
        if len(ids) <= limit:
            return Tokens(torch.tensor(ids), False)
        if getattr(tokenizer, "truncation_side", "right") == "left":
            return Tokens(torch.tensor(ids[:n_before] + ids[len(ids) - limit + n_before :]), True)
        return Tokens(torch.tensor(ids[: limit - n_after] + ids[len(ids) - n_after :]), True)

    return prepare


def _padded(texts: list[Tokens]) -> Tensor:
    """(b, longest)."""
    return nn.utils.rnn.pad_sequence([text.ids for text in texts], batch_first=True, padding_value=PADDING)


def _forward(encoded: Callable[[Tensor], Tensor], batch: Tensor) -> Tensor:
    """(b, l) of (b, t): long texts first, as many in a pass as `TOKENS` allow, then in their order again."""
    lengths = (batch != PADDING).sum(1)
    order = lengths.argsort(descending=True, stable=True)
    passes = _passes(lengths[order].tolist())
    features = torch.cat([encoded(batch[order[first:stop], :longest]) for first, stop, longest in passes])
    return features[order.argsort()]


def _passes(lengths: list[int]) -> Iterator[tuple[int, int, int]]:
    """First, stop and the longest of each pass, of texts in descending order.

    >>> list(_passes([8192, 4096, 4096, 10]))
    [(0, 1, 8192), (1, 3, 4096), (3, 4, 10)]
    """
    first = 0
    while first < len(lengths):
        stop = first + max(1, TOKENS // max(1, lengths[first]))
        yield first, min(stop, len(lengths)), lengths[first]
        first = stop


def _encoded(tower: Any, recipe: _Recipe, pad: int, ids: Tensor) -> Tensor:
    """(b, l) of (b, t)."""
    mask = ids != PADDING
    hidden = tower(input_ids=ids.masked_fill(~mask, pad), attention_mask=mask.long()).last_hidden_state.float()
    weight = mask[..., None]
    pooled = hidden[:, 0] if recipe.pooling == "cls" else (hidden * weight).sum(1) / weight.sum(1)
    features: Tensor = recipe.head(pooled)
    return features


class _Normalised(nn.Module):
    """A vector by its length."""

    def forward(self, vectors: Tensor) -> Tensor:
        return nn.functional.normalize(vectors, dim=1)


def _read_recipe(name: str, place: Repository) -> _Recipe:
    try:
        return _recipe(name, place)
    except InputError:
        raise
    except Exception as error:  # files of others: keys that are not there, shapes that do not fit, half a download
        raise InputError(
            f"the files of sentence-transformers in '{name}' do not fit together ({error}); get it again"
        ) from error


def _recipe(name: str, place: Repository) -> _Recipe:
    """Pooling, dense layers and normalisation as the files of sentence-transformers say, or the mean."""
    found = _read(place, "modules.json", default=[])
    pooling, with_prompt, head, names = "mean", True, [], []
    for module in found:
        kind, folder = str(module["type"]).rpartition(".")[2], module["path"]
        if kind == "Pooling":
            config = _read(place, f"{folder}/config.json")
            pooling, with_prompt = _pooling(name, config), config.get("include_prompt", True)
        elif kind == "Dense":
            head.append(_dense(name, place, folder))
        elif kind == "Normalize":
            head.append(_Normalised())
        elif kind != "Transformer":
            raise _other(name, f"has a module {kind}")
        names += [kind.lower()] if kind in ("Dense", "Normalize") else []
    return _Recipe(pooling, nn.Sequential(*head), "+".join([pooling, *names]), bool(with_prompt))


def _pooling(name: str, config: Mapping[str, Any]) -> str:
    """``pooling_mode`` is one or several names; before, there was one key for each, which may be true."""
    keys = [key.removeprefix("pooling_mode_") for key, on in config.items() if "pooling_mode_" in key and on is True]
    given = config.get("pooling_mode", [key.removesuffix("s").removesuffix("_token") for key in keys])
    modes = [given] if isinstance(given, str) else list(given)
    if modes not in (["cls"], ["mean"]):
        raise _other(name, f"pools by {' and '.join(modes) or 'nothing'}")
    return str(modes[0])


def _dense(name: str, place: Repository, folder: str) -> nn.Module:
    """One layer, with the activation behind it."""
    config = _read(place, f"{folder}/config.json")
    activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in ACTIVATIONS:
        raise _other(name, f"has a dense layer with {activation}")
    layer = nn.Linear(config["in_features"], config["out_features"], bias=config.get("bias", True))
    layer.load_state_dict({key.removeprefix("linear."): tensor for key, tensor in _weights(place, folder).items()})
    return nn.Sequential(layer, ACTIVATIONS[activation]())


def _weights(place: Repository, folder: str) -> dict[str, Tensor]:
    if file := file_in(place, f"{folder}/model.safetensors"):
        return load_file(file)
    if file := file_in(place, f"{folder}/pytorch_model.bin"):
        return dict(torch.load(file, weights_only=True, map_location="cpu"))
    raise InputError(f"the folder {folder} of the model has no weights; get the model again")


def _other(name: str, what: str) -> InputError:
    return InputError(
        f"'{name}' {what}, which apfl does not compute; take the model without what its files add, with --pooling mean "
        "or --pooling cls"
    )


def _prompt(name: str, place: Repository, recipe: _Recipe) -> str:
    """What the model wants before every text."""
    config = _read(place, "config_sentence_transformers.json")
    prompt = str((config.get("prompts") or {}).get(config.get("default_prompt_name")) or "")
    if prompt and not recipe.with_prompt:
        raise _other(name, "leaves the words that it puts before every text out of its pooling")
    return prompt


def _limit(settings: Mapping[str, Any], tokenizer: Any, tower: Any) -> int:
    """The tokens of a text that the model reads: the least of what its files say."""
    positions = getattr(tower.config, "max_position_embeddings", None)
    if positions and hasattr(getattr(tower, "embeddings", None), "padding_idx"):  # RoBERTa counts from there
        positions -= tower.embeddings.padding_idx + 1
    said = [settings.get("max_seq_length"), positions, tokenizer.model_max_length]
    return int(min((limit for limit in said if limit and limit < 10**6), default=LONGEST))


def _tokenizer_sha256(tokenizer: Any) -> str:
    """Of all that decides which tokens a text has."""
    if hasattr(tokenizer, "backend_tokenizer"):
        rules = json.loads(tokenizer.backend_tokenizer.to_str()) | {"truncation": None, "padding": None}
    else:
        rules = {"kind": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    return hashlib.sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()


def _read(place: Repository, name: str, default: Any = None) -> Any:
    """A JSON file of the model; nothing if there is none."""
    path = file_in(place, name)
    if path is None:
        return {} if default is None else default
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON ({error}); get the model again") from error
