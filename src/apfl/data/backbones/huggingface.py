"""Any model of images or texts of the Hugging Face Hub, through ``AutoModel`` and its own image processor (Pillow's, so
that torchvision is not needed) or tokenizer. `_sentences` has what is particular to texts.

``cls`` is the class token of the last layer, ``mean`` the average of its patch tokens, or of the activation map of a
convolutional network. Models pretrained by masking (ViT-MAE) would drop three quarters of the patches of every image,
at random, also when they only look: here the mask ratio is 0 and the patches keep their order.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from apfl.data.backbones import Backbone, backbone_names, weights_sha256
from apfl.data.backbones._pixels import preparation
from apfl.data.backbones._sentences import sentence_encoder
from apfl.data.hub_access import Repository, locate, offline, unavailable
from apfl.errors import InputError, optional, printable, unknown

PRESETS: dict[str, tuple[str, str | None]] = {  # name: (repository, pooling unless another is asked for)
    "vit-mae-base": ("facebook/vit-mae-base", "cls"),
    "dinov2-small": ("facebook/dinov2-small", "cls"),
    "clip-vit-b32": ("openai/clip-vit-base-patch32", "cls"),
    # Of texts, pooled as their files say.
    "all-minilm-l6-v2": ("sentence-transformers/all-MiniLM-L6-v2", None),
    "paraphrase-multilingual-minilm-l12-v2": ("sentence-transformers/paraphrase-multilingual-MiniLM-L12-v2", None),
}


def load(name: str, *, pooling: str | None = None, revision: str | None = None) -> Backbone:
    """A preset, ``owner/name``, or a folder that ``save_pretrained`` or ``hf download`` wrote."""
    repository, preset_pooling = PRESETS.get(name, (name, None))
    pooling = pooling or preset_pooling
    is_folder = Path(repository).is_dir()
    if not is_folder and not re.fullmatch(r"\w[\w.-]*/[\w.-]+", repository):
        raise unknown("backbone, folder or owner/name on the Hub", name, backbone_names())
    place = Repository(repository, None, reachable=True) if is_folder else locate(repository, "model", revision)
    called = name if name in PRESETS or not Path(name).is_dir() else Path(name).resolve().name
    model, missing = _model(repository, place)
    if _sees(model):
        backbone = _for_images(called, repository, model, place, pooling, missing)
    else:
        tokenizer = _loaded(repository, place, "AutoTokenizer", "a model of texts with a tokenizer")
        backbone = sentence_encoder(called, model, tokenizer, place, pooling, missing)
    return replace(backbone, revision=place.revision or getattr(model.config, "_commit_hash", None))


def _sees(model: Any) -> bool:
    """Whether it takes images; CLIP and its kin take texts as well."""
    return hasattr(model, "vision_model") or model.main_input_name == "pixel_values"


def _for_images(
    name: str, repository: str, model: Any, place: Repository, pooling: str | None, missing: list[str]
) -> Backbone:
    if pooling is None:
        raise InputError(f"'{name}' is not a preset: say how it is pooled with --pooling cls or --pooling mean")
    optional("PIL.Image", "hub")
    what = "a vision model with an image processor"
    processor = _loaded(repository, place, "AutoImageProcessor", what, backend="pil")
    tower = getattr(model, "vision_model", model)  # CLIP and its kin come with a text model, which is left aside
    tower = tower.eval().requires_grad_(False)
    prepare, finish = preparation(processor, tower)
    return Backbone(
        name=name,
        takes="images",
        weights=weights_sha256(tower, without=[key.removeprefix("vision_model.") for key in missing]),
        preprocessing=processor.to_dict(),
        pooling=pooling,
        module=tower,
        prepare=prepare,
        forward=_forward(name, tower, pooling, finish),
    )


def _model(name: str, place: Repository) -> tuple[Any, list[str]]:
    """The model, and the parameters that are not in the checkpoint but do not matter."""
    what = "a model of images or texts"
    config = _loaded(name, place, "AutoConfig", what)
    if hasattr(config, "mask_ratio"):
        config.mask_ratio = 0.0
    options = {"config": config, "dtype": torch.float32, "output_loading_info": True}
    model, report = _loaded(name, place, "AutoModel", what, **options)
    # A pooler on top is often missing, drawn at random, and not used here. Anything else missing would be used.
    missing = sorted(report["missing_keys"])
    needed = [key for key in missing if "pooler" not in key]
    if needed:
        raise InputError(f"'{place.source}' lacks {len(needed)} weights of its model, {needed[0]} first; get it again")
    return model, missing


def _loaded(name: str, place: Repository, loader: str, what: str, **options: Any) -> Any:
    """What a loader of transformers makes of the repository."""
    transformers = optional("transformers", "hub")
    where: dict[str, Any] = {"pretrained_model_name_or_path": place.source, "revision": place.revision}
    where |= {} if place.reachable else {"local_files_only": True}
    try:
        with offline(place), _quiet(transformers.utils.logging):
            return getattr(transformers, loader).from_pretrained(**where, **options)
    except Exception as error:  # a bad folder shows as errors of json, safetensors, torch and the operating system
        if not place.reachable:
            raise unavailable(name, "model") from error
        raise InputError(f"'{place.source}' cannot be loaded as {what}: {printable(error)}") from error


@contextmanager
def _quiet(logging: Any) -> Iterator[None]:
    """Without reports on weights that feature extraction does not use, such as the decoder of ViT-MAE."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _forward(name: str, tower: Any, pooling: str, finish: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Prepared images to pooled features."""
    parameters = [parameter for parameter, _ in tower.named_parameters()]
    has_class_token = any(p.endswith(("cls_token", "class_embedding")) for p in parameters)
    n_registers = int(getattr(tower.config, "num_register_tokens", 0) or 0)
    n_distilled = sum(p.endswith("distillation_token") for p in parameters)  # DeiT's, behind the class token
    n_before = has_class_token + n_distilled + n_registers  # tokens that are not patches
    takes_noise = "noise" in inspect.signature(tower.forward).parameters
    if pooling == "cls" and not has_class_token:
        raise InputError(f"--pooling cls given, but '{name}' has no class token; use mean")

    def forward(batch: Tensor) -> Tensor:
        more = {"noise": _ascending(tower, batch)} if takes_noise else {}
        hidden: Tensor = tower(pixel_values=finish(batch), **more).last_hidden_state
        if hidden.ndim == 4:  # (b, l, h, w)
            return hidden.mean((2, 3))
        if pooling == "mean":
            return hidden[:, n_before:].mean(1)
        token = hidden[:, 0]
        normalised: Tensor = tower.post_layernorm(token) if hasattr(tower, "post_layernorm") else token  # CLIP's
        return normalised

    return forward


def _ascending(tower: Any, batch: Tensor) -> Tensor:
    """(b, patches). Masking sorts patches by noise; noise that ascends leaves them in their order."""
    return torch.arange(tower.embeddings.patch_embeddings.num_patches, device=batch.device).expand(len(batch), -1)
