"""What the kinds of models have in common: rows scored block by block, predictions, files, ONNX and the Hub."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from apfl.errors import InputError
from apfl.maths.normalise import Normaliser
from apfl.models import hub
from apfl.models.file import Container, about, read, write
from apfl.models.predict import features_of, like, predicted

__all__ = ["ClientModel", "common_of"]

FILE = "model.safetensors"  # of a folder or repository with one model
_ROWS = 8192  # scored at a time, so that no map of all rows is in memory


class ClientModel(ABC):
    """A client's model that is kept in a file of its ``kind``. Each kind is a dataclass with the fields below."""

    kind: str
    normaliser: Normaliser
    class_names: Sequence[str] | None
    temperature: float | None = None  # of softmax(scores / temperature)
    about: Mapping[str, Any]  # whose model it is, of which features; see `file.about`

    def scores(self, features: Any) -> Tensor:
        """(n, c), higher is likelier; rows in any form that `predict` takes."""
        return torch.cat([self._scores(rows) for rows in torch.split(features_of(self, features), _ROWS)])

    @abstractmethod
    def _scores(self, features: Tensor) -> Tensor:
        """The scores of one block of rows."""

    def predict(self, features: Any) -> Any:
        """The class of each row. A tensor gives indices, -1 without a decision (see `apfl.models.undecided`); an array
        or a DataFrame gives the names of the classes if the model knows them, '' without a decision."""
        return predicted(self, features)

    def predict_proba(self, features: Any) -> Any:
        """softmax(scores / temperature), (n, c): an array, or a tensor for a tensor. Of several labels, the scores
        between 0 and 1; a model of numbers has none.

        Without a temperature (models of `apfl run` have none) the order of the classes is right, but the probabilities
        are not calibrated.
        """
        target = self.about.get("target", "classification")
        if target == "regression":
            raise InputError("this model predicts numbers, which have no probabilities; use predict")
        if target == "multilabel":
            return like(features, self.scores(features).double().clamp(0, 1))
        return like(features, torch.softmax(self.scores(features).double() / (self.temperature or 1.0), 1))

    @abstractmethod
    def container(self) -> Container:
        """The model as data."""

    @classmethod
    @abstractmethod
    def from_container(cls, container: Container) -> Self:
        """The model back from data."""

    def save(self, path: str | Path) -> None:
        """Write the model as one self-contained safetensors file."""
        write(self.container(), path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a model that `save` (or `apfl run`, or `apfl export`) wrote."""
        return cls.from_container(read(path))

    def to_onnx(self, path: str | Path) -> None:
        """Write the model as an ONNX file: float32 ``features`` in; ``class``, ``scores``, ``probabilities`` out.

        Needs the extra ``onnx``. The scores are those of the model in float64, to 1e-9 of the largest one; with the
        activation gelu to 1e-6, because onnxruntime has erf in float32 alone.
        """
        from apfl.models.onnx_graph import write_onnx  # it knows all models

        write_onnx(self, path)

    def save_pretrained(
        self, folder: str | Path, *, data: str = "", metrics: Mapping[str, float] | None = None
    ) -> None:
        """Write ``model.safetensors`` and a model card, as `push_to_hub` does, into a local folder."""
        hub.save_folder(self._write, hub.card_of(self, data, metrics), folder)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        data: str = "",
        metrics: Mapping[str, float] | None = None,
        private: bool = True,
        **options: Any,
    ) -> str:
        """Upload the model with a generated card to the Hugging Face Hub; the address of the commit.

        The file tells about the rows it was fitted to; a warning and the card say what. So the repository is private
        unless you say ``private=False``. ``data`` says in words what the rows are, and ``metrics`` are numbers for the
        card. ``options`` are those of `huggingface_hub.ModelHubMixin.push_to_hub`: token, branch, commit_message, ...
        """
        return hub.push(self._write, hub.card_of(self, data, metrics), repo_id, private=private, **options)

    @classmethod
    def from_pretrained(cls, repo_or_folder: str | Path, **options: Any) -> Self:
        """Load a model from the Hub or from the folder of `save_pretrained`; ``options``: revision, token, ..."""
        return cls.load(hub.folder_of(repo_or_folder, **options) / FILE)

    def _write(self, folder: Path) -> None:
        self.save(folder / FILE)

    def _with_common(self, tensors: Mapping[str, Tensor | None], settings: Mapping[str, Any]) -> Container:
        """The container of a kind's own tensors (None: it has none) and settings, and of what every kind has."""
        every = {**tensors, "mean": self.normaliser.mean, "std": self.normaliser.std}
        common: dict[str, Any] = {
            "normalise": self.normaliser.how,
            "class_names": None if self.class_names is None else list(self.class_names),
        }
        if self.about:
            common["about"] = dict(self.about)
        known = {name: tensor for name, tensor in every.items() if tensor is not None}
        return Container(self.kind, known, {**settings, **common})


def common_of(container: Container) -> dict[str, Any]:
    """The fields that every kind of model has, back from data."""
    tensors, settings = container.tensors, container.settings
    return {
        "normaliser": Normaliser(settings["normalise"], tensors.get("mean"), tensors.get("std")),
        "class_names": settings["class_names"],
        "about": about(container),
    }
