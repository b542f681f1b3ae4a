"""`APFLClassifier` as a folder: its settings, the shared stream and clients' models. No rows and no sums.

classifier.json                    settings, classes, names of features, and which file is whose
shared.safetensors                 the primary stream alone
client-K-NAME.safetensors          a client's model, which `apfl predict` takes too
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
from sklearn.utils.validation import check_is_fitted

from apfl.errors import InputError
from apfl.files import replacing
from apfl.methods._estimator.client_rows import no_clients
from apfl.methods._estimator.fitted import Fitted, Stream
from apfl.methods._streams import Map
from apfl.models import hub
from apfl.models.dual_stream import DualStream
from apfl.models.file import FORMAT_VERSION, load_model, model_file
from apfl.models.hub import Card, revealed
from apfl.models.landmark import LandmarkModel

__all__ = ["Filed"]

Classifier = TypeVar("Classifier")

INDEX = "classifier.json"
PLAIN = str | int | float | bool


class Filed:
    """The part of `APFLClassifier` that goes to folders and to the Hub."""

    def save(self, folder: str | Path, *, clients: str | Iterable[Hashable] = "all") -> None:
        """Write settings, the shared stream and clients' models to a folder, without pickle; `load` reads it.

        Rows and sums are not written: what was loaded predicts, but nobody can join or leave. ``clients`` names those
        whose models are written, ``[]`` for the shared stream alone.
        """
        check_is_fitted(self)
        _refuse_labels(self)
        _save(self, Path(folder), _chosen(self, clients))

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Read a folder that `save` wrote."""
        return _load(cls, Path(folder))

    def push_to_hub(
        self,
        repo_id: str,
        *,
        clients: str | Iterable[Hashable] = (),
        data: str = "",
        metrics: Mapping[str, float] | None = None,
        private: bool = True,
        **options: Any,
    ) -> str:
        """Upload what `save` writes, with a generated card, to the Hugging Face Hub; the address of the commit.

        By default the shared stream alone, to a private repository: a client's model tells about the client's rows,
        and whoever downloads it keeps it. A warning and the card say what the files reveal. ``clients`` names those
        whose models go along. ``data`` says in words what the rows are, and ``metrics`` are numbers for the card.
        ``options`` are those of `huggingface_hub.ModelHubMixin.push_to_hub`.
        """
        check_is_fitted(self)
        _refuse_labels(self)
        chosen = _chosen(self, clients)
        card = _card(self, chosen, data, metrics)
        return hub.push(lambda folder: _save(self, folder, chosen), card, repo_id, private=private, **options)

    @classmethod
    def from_pretrained(cls, repo_or_folder: str | Path, **options: Any) -> Self:
        """Load from the Hub, or from the folder of `save`; ``options``: revision, token, cache_dir, ..."""
        return cls.load(hub.folder_of(repo_or_folder, **options))


def _chosen(classifier: Any, clients: str | Iterable[Hashable]) -> list[Hashable]:
    """The clients whose models are written: "all", or some by name; the shared stream is always there."""
    if isinstance(clients, str) and clients == "all":
        return list(classifier.clients_)
    if isinstance(clients, str) or not isinstance(clients, Iterable):
        raise InputError(f"clients={clients!r} given; give 'all' or a list (an empty one: the shared stream alone)")
    wanted = list(clients)
    if strange := [each for each in wanted if each not in classifier.clients_]:
        raise InputError(no_clients(strange, classifier.clients_))
    return wanted


def _save(classifier: Any, folder: Path, clients: Iterable[Hashable]) -> None:
    """Write the folder; one that holds something else is refused."""
    if folder.is_dir() and any(folder.iterdir()) and not (folder / INDEX).is_file():
        raise InputError(f"{folder} is not empty and holds no classifier; choose another folder, or empty it first")
    files = [(_plain(client), model_file(k, str(client))) for k, client in enumerate(clients)]
    index = _index(classifier, files)
    folder.mkdir(parents=True, exist_ok=True)
    classifier.model(None).save(folder / "shared.safetensors")
    for client, file in files:
        classifier.model(client).save(folder / file)
    with replacing(folder / INDEX) as temporary:
        temporary.write_text(json.dumps(index, indent=1), encoding="utf-8")
    for old in folder.glob("client-*.safetensors"):  # of clients that have left since
        if old.name not in [file for _, file in files]:
            old.unlink()


def _plain(client: Hashable) -> Hashable:
    if not isinstance(client, PLAIN):
        raise InputError(f"client {client!r} is {type(client).__name__}; only text and numbers can be saved")
    return client


def _index(classifier: Any, clients: list[tuple[Hashable, str]]) -> dict[str, Any]:
    params = dict(classifier.get_params())
    if not isinstance(params["random_state"], int | None):
        params["random_state"] = None  # a generator: the maps are drawn already
    if isinstance(params["class_weight"], Mapping):
        params["class_weight"] = None  # JSON has text as keys alone; the models have the weights in them already
    columns = getattr(classifier, "feature_names_in_", None)
    return {
        "format": "apfl classifier",
        "version": FORMAT_VERSION,
        "apfl": version("apfl"),
        "params": params,
        "classes": {"dtype": classifier.classes_.dtype.str, "values": classifier.classes_.tolist()},
        "n_features_in": int(classifier.n_features_in_),
        "feature_names_in": None if columns is None else columns.tolist(),
        "chosen": _settled(classifier),
        "clients": clients,
    }


def _settled(classifier: Any) -> dict[str, Any]:
    """The settings that were chosen and their accuracy, without the tables behind the choice."""
    return {name: value for name, value in classifier.chosen_.items() if isinstance(value, PLAIN | None)}


def _load(make: Callable[..., Classifier], folder: Path) -> Classifier:
    """The classifier of a folder that `save` wrote."""
    index = _read_index(folder / INDEX)
    try:
        params, classes = dict(index["params"]), index["classes"]
        if isinstance(params["activations"], list):  # JSON has no tuples
            params["activations"] = tuple(params["activations"])
        params.setdefault("map", "random")  # before there were landmarks
        params.setdefault("weight", 1.0)  # before it was chosen
        classifier: Any = make(**params)
        shared = _stream(folder / "shared.safetensors")
        models = {client: _stream(_inside(folder, file)) for client, file in index["clients"]}
        # The values come first: texts of any length, or numbers.
        values = np.array(classes["values"], dtype=np.dtype(classes["dtype"]))
        classifier.n_features_in_ = int(index["n_features_in"])
        if index["feature_names_in"] is not None:
            classifier.feature_names_in_ = np.array(index["feature_names_in"], dtype=object)
        account: Mapping[str, Any] = dict(index["chosen"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{folder / INDEX} is damaged ({error!r}); save the classifier again") from error
    classifier._fitted = Fitted(
        values, shared.normaliser, _maps(shared, models.values()), classifier.keep_rows, shared=shared, models=models,
        account=account,
    )  # fmt: skip
    return classifier  # type: ignore[no-any-return]


def _stream(path: Path) -> Stream:
    model = load_model(path)
    if not isinstance(model, DualStream | LandmarkModel):
        raise InputError(f"{path} is no model of a classifier; save the classifier again")
    return model


def _maps(shared: Stream, models: Iterable[Stream]) -> tuple[Map, Map]:
    """Those of both streams."""
    if isinstance(shared, LandmarkModel):
        return shared.feature_map, shared.feature_map
    found = (model.refinement_map for model in models if isinstance(model, DualStream) and model.refinement_map)
    return shared.primary_map, next(found, shared.primary_map)


def _inside(folder: Path, file: str) -> Path:
    if Path(file).name != file:
        raise InputError(f"{folder / INDEX} names {file!r}, which is not in its folder; save the classifier again")
    return folder / file


def _read_index(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise InputError(f"there is no {path}; give a folder that APFLClassifier.save or push_to_hub wrote")
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is damaged ({error}); save the classifier again") from error
    if not isinstance(index, dict) or index.get("format") != "apfl classifier":
        raise InputError(f"{path} is not the index of an APFLClassifier; give a folder that its save wrote")
    if index.get("version") != FORMAT_VERSION:
        raise InputError(
            f"{path} has format version {index.get('version')}; this apfl reads version {FORMAT_VERSION}: use the "
            f"release that wrote it ({index.get('apfl')})"
        )
    return index


def _card(classifier: Any, clients: list[Hashable], data: str, metrics: Mapping[str, float] | None) -> Card:
    """What the model card of these clients' models says."""
    fitted, models = classifier._fitted, [classifier.model(client) for client in (None, *clients)]
    rows = {} if fitted.statistics is None else {"rows": fitted.statistics.n_samples}
    names = getattr(classifier, "feature_names_in_", None)
    about = {
        "data": data or "not stated",
        **rows,
        "features": classifier.n_features_in_ if names is None else ", ".join(map(str, names)),
        "classes": f"{len(classifier.classes_)}: {', '.join(map(str, classifier.classes_))}",
        "clients behind the shared stream": len(classifier.clients_),
        "clients whose models are here": ", ".join(map(str, clients)) or "none: the shared stream alone",
    }
    chosen = _settled(classifier)
    left_out = {"accuracy on left-out rows": chosen.pop("left_out_accuracy", None) or "not stated: few rows"}
    return Card(
        title="Classifier of a federation" if clients else "Shared stream of a federation",
        summary="An APFLClassifier of [apfl](https://pypi.org/project/apfl), analytic personalised federated learning: "
        "a ridge shared by all clients, and for each client a private one on what it gets wrong there.",
        revealed=" ".join(dict.fromkeys(map(revealed, models))),
        use='from apfl import APFLClassifier  # pip install "apfl[hub]"\n\n'
        'clf = APFLClassifier.from_pretrained("REPOSITORY")\nlabels = clf.predict(rows, clients="NAME")',
        tables={
            "Data and clients": about,
            "Settings": classifier.get_params() | {f"{name}, as chosen": value for name, value in chosen.items()},
            "Metrics": {**left_out, **(metrics or {})},
        },
    )


def _refuse_labels(classifier: Any) -> None:
    if hasattr(classifier, "_labels"):
        raise InputError("a classifier of several labels has no folder; save each client's .model(client).save(FILE)")
