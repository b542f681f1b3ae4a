"""Models on the Hugging Face Hub, through `huggingface_hub`'s mixin, with a generated card.

The card says what the model is, what it was fitted to, what privacy it has (none by noise) and what its files reveal.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from apfl.errors import InputError, optional, printable

if TYPE_CHECKING:
    from apfl.models.base import ClientModel

__all__ = ["Card", "card_of", "folder_of", "push", "revealed", "save_folder"]

FILES = ["*.safetensors", "*.json"]
NO_NOISE = (
    "No noise was added to anything, so there is no differential privacy and no bound (epsilon, delta). Sums over the "
    "rows of all clients are behind the shared stream; the refinement stream is fitted to one client's own rows."
)
TEMPLATE = """---
{{ card_data }}
---

# {{ title }}

{{ summary }}

> **Before you share this: what the files reveal.** {{ revealed }}
> Give them only to people who may know this. A file that was downloaded cannot be taken back.

{% for heading, rows in tables.items() %}## {{ heading }}

| | |
| --- | --- |
{% for name, value in rows.items() %}| {{ name }} | {{ value }} |
{% endfor %}
{% endfor %}## Privacy account

{{ privacy }}

## Use

```python
{{ use }}
```
"""


@dataclass(frozen=True)
class Card:
    """What a model card says."""

    title: str
    summary: str
    revealed: str
    use: str
    tables: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    privacy: str = NO_NOISE

    def filled(self) -> dict[str, Any]:
        """The words of the template; text from outside as one line that no table or tag of the card can break."""
        tables = {
            heading: {_cell(name): _cell(value) for name, value in rows.items()}
            for heading, rows in self.tables.items()
            if rows
        }
        words = {name: printable(getattr(self, name), 5000) for name in ("title", "summary", "revealed", "privacy")}
        return {**words, "tables": tables, "use": self.use}


def _cell(value: object) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else printable(value, 2000)
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def _mixin(write: Callable[[Path], None] | None) -> Any:
    """An object that the Hub's mixin can save, push and load."""
    hub = optional("huggingface_hub", "hub")

    base: Any = hub.ModelHubMixin
    tags = ["federated-learning", "personalization", "ridge-regression"]

    class Shared(base, library_name="apfl", tags=tags, model_card_template=TEMPLATE):  # type: ignore[misc,call-arg]
        folder: Path

        def _save_pretrained(self, save_directory: Path) -> None:
            assert write is not None, "what was loaded is not written again"
            write(save_directory)

        @classmethod
        def _from_pretrained(cls, *, model_id: str, **options: Any) -> Any:
            known = ("revision", "cache_dir", "force_download", "local_files_only", "token")
            given = {name: options.get(name) for name in known}
            found = cls()
            is_local = Path(model_id).is_dir()
            found.folder = Path(
                model_id if is_local else hub.snapshot_download(model_id, allow_patterns=FILES, **given)
            )
            return found

    return Shared() if write is not None else Shared


def save_folder(write: Callable[[Path], None], card: Card, folder: str | Path) -> None:
    """Let ``write`` fill the folder, and put the card beside it."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / "README.md").unlink(missing_ok=True)  # the mixin keeps one that is there, of another model
    _mixin(write).save_pretrained(folder, model_card_kwargs=card.filled())


def push(write: Callable[[Path], None], card: Card, repo_id: str, *, private: bool, **options: Any) -> str:
    """Upload what ``write`` writes, with the card; warn of what it reveals."""
    shared = _mixin(write)
    if private:
        _refuse_public(repo_id, options.get("token"))
    whom = "whoever may read this private repository" if private else "EVERYBODY, because private=False"
    warnings.warn(f"{repo_id} will tell {whom}: {card.revealed}", stacklevel=3)
    options.setdefault("commit_message", f"Model of apfl {version('apfl')}")
    return str(shared.push_to_hub(repo_id, private=private, model_card_kwargs=card.filled(), **options))


def _refuse_public(repo_id: str, token: str | None) -> None:
    """A repository that is public stays public, whatever is asked for when it is pushed to."""
    api = optional("huggingface_hub", "hub").HfApi(token=token)
    if api.repo_exists(repo_id) and not api.model_info(repo_id).private:
        raise InputError(
            f"the repository {repo_id} is public, so everybody could read the model; give another repository, make "
            "this one private, or say private=False"
        )


def folder_of(repo_or_folder: str | Path, **options: Any) -> Path:
    """The local folder of a repository, downloaded if need be; a folder as it is."""
    if Path(repo_or_folder).is_dir():
        return Path(repo_or_folder)
    found: Path = _mixin(None).from_pretrained(str(repo_or_folder), **options).folder
    return found


def revealed(model: ClientModel) -> str:
    """What the file of this model tells about the rows behind it."""
    tensors, told = model.container().tensors, []
    if "client" in model.about:
        told.append(f"the name of its client ({printable(model.about['client'], 100)})")
    if model.class_names is not None:
        told.append("the names of the classes")
    if "feature_names" in model.about:
        told.append("the names of the features")
    if "mean" in tensors:
        told.append("the mean and spread of every feature over the rows of all clients")
    if "points" in tensors:
        told.append("the mean and the covariance of the rows of all clients, roughly, by its landmarks")
    if "prior" in tensors:
        told.append("how often the client has each class")
    shared = "primary" in tensors or ("points" in tensors and not {"client", "prior"} & {*model.about, *tensors})
    if {"refinement", "weight"} & set(tensors) or ("weights" in tensors and not shared):
        told.append("weights fitted to the client's own rows, by which others can test whether a row was among them")
    if shared:
        told.append("the shared stream, a function of the sums over all clients")
    return f"The model file holds {'; '.join(told)}."


def card_of(model: ClientModel, data: str, metrics: Mapping[str, float] | None) -> Card:
    """The card of one model."""
    settings = {
        name: value for name, value in model.container().settings.items()
        if name not in ("about", "class_names") and value is not None
    }  # fmt: skip
    names, kind = model.class_names, type(model).__name__
    about = {"data": data or "not stated"} | {name: value for name, value in model.about.items() if value}
    about |= {} if names is None else {"classes": f"{len(names)}: {', '.join(names)}"}
    return Card(
        title=f"Personal model of {model.about['client']}" if "client" in model.about else "Shared model",
        summary=f"A {kind} of [apfl](https://pypi.org/project/apfl), analytic personalised federated learning: rows of "
        "features in, classes out, fitted in closed form.",
        revealed=revealed(model),
        use=f'from {type(model).__module__} import {kind}  # pip install "apfl[hub]"\n\n'
        f'model = {kind}.from_pretrained("REPOSITORY")\nnames = model.predict(rows)',
        tables={"Data and client": about, "Settings": settings, "Metrics": metrics or {"metrics": "not stated"}},
    )
