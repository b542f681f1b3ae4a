"""Texts, tiny encoders and tables that the tests of texts make for themselves."""

from __future__ import annotations

import json
from pathlib import Path

import torch

WORDS = {
    "billing": ["invoice", "refund", "payment", "charged", "price", "receipt"],
    "travel": ["flight", "hotel", "luggage", "delayed", "passport", "train"],
    "health": ["doctor", "fever", "cough", "medicine", "hospital", "nurse"],
}
COMMON = ["the", "a", "my", "was", "and", "is", "please", "help", "with", "today"]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *COMMON, *(word for words in WORDS.values() for word in words)]


def text(row: int, length: int = 8) -> str:
    """A sentence of the class row % 3."""
    generator = torch.Generator().manual_seed(row)
    own, topic = torch.randint(6, (length,), generator=generator).tolist(), list(WORDS.values())[row % 3]
    filler = torch.randint(len(COMMON), (length,), generator=generator).tolist()
    return " ".join(topic[i] if place % 2 else COMMON[j] for place, (i, j) in enumerate(zip(own, filler, strict=True)))


def rows(n: int = 60) -> list[dict[str, object]]:
    """Labelled texts of several lengths at three sites."""
    names = list(WORDS)
    return [{"text": text(i, 4 + i % 9), "label": names[i % 3], "site": f"s{i // 3 % 3}", "age": i} for i in range(n)]


def write_csv(path: Path, table: list[dict[str, object]]) -> Path:
    lines = [",".join(table[0]), *(",".join(str(value) for value in row.values()) for row in table)]
    path.write_text("\n".join(lines) + "\n")
    return path


def tiny_bert(folder: Path, *, kind: str = "bert", seed: int = 0) -> Path:
    """A random BERT (or another family) of a few words with its tokenizer, as ``save_pretrained`` writes them."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    torch.manual_seed(seed)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    common = {**size, "vocab_size": len(VOCABULARY), "initializer_range": 0.1, "pad_token_id": 0}
    if kind == "bert":
        config = transformers.BertConfig(**common, max_position_embeddings=24)
        transformers.BertModel(config).save_pretrained(folder)
    elif kind == "roberta":
        transformers.RobertaModel(transformers.RobertaConfig(**common, max_position_embeddings=24)).save_pretrained(
            folder
        )
    else:
        t5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": len(VOCABULARY)}
        transformers.T5Model(transformers.T5Config(**t5, pad_token_id=0)).save_pretrained(folder)
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A [SEP]" if kind == "t5" else "[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    fast.save_pretrained(folder)
    return folder


def add_modules(folder: Path, *modules: str, pooling: dict[str, object] | None = None, **files: object) -> Path:
    """The files of sentence-transformers: ``modules`` after the model, and ``files`` by their names without .json."""
    names = ["Transformer", *modules]
    places = ["" if i == 0 else f"{i}_{name}" for i, name in enumerate(names)]
    listed = [
        {"idx": i, "name": str(i), "path": place, "type": f"sentence_transformers.models.{name}"}
        for i, (name, place) in enumerate(zip(names, places, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    for name, place in zip(names, places, strict=True):
        if name == "Pooling":
            (folder / place).mkdir(exist_ok=True)
            (folder / place / "config.json").write_text(json.dumps(pooling or {"pooling_mode_mean_tokens": True}))
        if name == "Dense":
            add_dense(folder / place)
    for file, content in files.items():
        (folder / f"{file}.json").write_text(json.dumps(content))
    return folder


def add_dense(folder: Path) -> None:
    from safetensors.torch import save_file

    folder.mkdir(exist_ok=True)
    config = {"in_features": 32, "out_features": 5, "bias": True}
    config |= {"activation_function": "torch.nn.modules.activation.Tanh"}
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(7)
    weight, bias = (torch.randn(*shape, generator=generator) for shape in ((5, 32), (5,)))
    save_file({"linear.weight": weight, "linear.bias": bias}, folder / "model.safetensors")
