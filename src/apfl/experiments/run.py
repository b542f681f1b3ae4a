"""From a dataset to records: deal the rows out, run a method, measure it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apfl.data.federation import Dataset, Federation
from apfl.data.partition import PARTITIONS, options_of
from apfl.data.protocol import Protocol, apart, federate
from apfl.errors import InputError
from apfl.experiments.checkpoint import Checkpoint, load, save
from apfl.experiments.metrics import headline_scores, target_metrics
from apfl.experiments.record import Record, user_files, with_hashes
from apfl.methods import Method, Round, check_predicts
from apfl.models.file import Model, model_file, write

__all__ = ["Protocol", "federate", "record_of", "run", "save_models", "train", "versions"]


def run(
    name: str,
    method: Method,
    federation: Federation,
    dataset: Dataset,
    protocol: Protocol,
    seed: int,
    *,
    on_round: Callable[[Round], None] | None = None,
    checkpoint: Path | None = None,
    checkpoint_seconds: float = 60,
) -> tuple[Record, Sequence[Model]]:
    """Train and measure one method. ``seconds`` counts training alone; the last round is what is measured.

    With ``checkpoint`` a run of many rounds that is stopped leaves that file, and the next one goes on from it; a
    killed one goes on from what it last wrote, at most ``checkpoint_seconds`` before. Where the protocol has clients
    unseen in training, models and metrics are theirs alone.
    """
    trained, late = apart(federation, protocol, seed)
    what = _identity(name, method, dataset, protocol, seed)
    last, seconds, curve = _train(name, method, trained, late, seed, what, on_round, checkpoint, checkpoint_seconds)
    models = last.models if late is None else _admitted(name, last, late)
    measured = trained if late is None else late
    own = replace(last, models=models)
    return record_of(
        name, method, own, measured, dataset, protocol, seed, seconds, curve, len(federation.train)
    ), models


def record_of(
    name: str,
    method: Method,
    last: Round,
    measured: Federation,
    dataset: Dataset,
    protocol: Protocol,
    seed: int,
    seconds: float,
    curve: Sequence[Sequence[float]] = (),
    n_clients: int | None = None,
) -> Record:
    """The record of a last round: its models on the test rows of the clients that are ``measured``."""
    models, uses_alpha = last.models, "alpha" in options_of(protocol.partition)
    return Record(
        method=name,
        seed=seed,
        data=dataset.name,
        data_sha256=dataset.sha256,
        partition=PARTITIONS.name_of(protocol.partition),
        n_clients=len(measured.train) if n_clients is None else n_clients,
        alpha=protocol.alpha if uses_alpha else None,
        settings=asdict(method),
        protocol=asdict(protocol),
        **target_metrics(models, measured, last.primary),
        client_names=list(measured.names),
        n_train=[len(shard) for shard in measured.train],
        n_test=[len(shard) for shard in measured.test],
        rounds=last.index,
        bytes_up=last.bytes_up,
        bytes_down=last.bytes_down,
        seconds=seconds,
        device=str(measured.train[0].features.device),
        threads=torch.get_num_threads(),
        versions=versions(),
        class_names=list(measured.class_names),
        chosen=dict(last.chosen),
        provenance=dict(dataset.provenance),
        curve=curve,
        first_client_scores=_norm_of_scores(models, measured) if protocol.reshuffle is not None else None,
        files=user_files(method, protocol),
    )


def train(
    name: str,
    method: Method,
    federation: Federation,
    dataset: Dataset,
    protocol: Protocol,
    seed: int,
    *,
    on_round: Callable[[Round], None] | None = None,
    checkpoint: Path | None = None,
    checkpoint_seconds: float = 60,
) -> Sequence[Model]:
    """`run` without measuring: the models of a federation that has no test rows."""
    what = _identity(name, method, dataset, protocol, seed)
    return _train(name, method, federation, None, seed, what, on_round, checkpoint, checkpoint_seconds)[0].models


def _identity(name: str, method: Method, dataset: Dataset, protocol: Protocol, seed: int) -> Sequence[Any]:
    """Of which run a checkpoint is."""
    described = [name, seed, dataset.sha256, asdict(protocol), asdict(method)]
    return with_hashes(described, user_files(method, protocol))


def _train(
    name: str,
    method: Method,
    federation: Federation,
    late: Federation | None,
    seed: int,
    what: Sequence[Any],
    on_round: Callable[[Round], None] | None,
    checkpoint: Path | None,
    checkpoint_seconds: float,
) -> tuple[Round, float, list[list[float]]]:
    """The last round, the seconds it took to get there, and the curve; ``what`` says of which run a checkpoint is."""
    earlier = None if checkpoint is None else load(checkpoint, what)
    seconds, curve = (0.0, []) if earlier is None else (earlier.seconds, earlier.curve)
    given = federation.train, federation.n_classes, seed
    check_predicts(name, method, federation.target)
    rounds = method.rounds(*given) if earlier is None else method.resume(earlier.state, *given)
    reached: tuple[Round, float, int] | None = None  # a whole round, the time so far, the length of the curve before it
    written = time.monotonic()

    def keep() -> None:
        if checkpoint is not None and reached is not None and reached[0].state is not None:
            save(checkpoint, what, Checkpoint(reached[0].state, reached[1], curve[: reached[2]]))

    try:
        while True:
            start = time.perf_counter()
            current = next(rounds, None)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if current is None:
                break
            seconds += time.perf_counter() - start
            curve.append(
                [seconds, float(current.bytes_up + current.bytes_down), _score(name, current, federation, late)]
            )
            reached = (current, seconds, len(curve) - 1)
            if on_round is not None:
                on_round(current)
            if time.monotonic() - written > checkpoint_seconds:
                keep()
                written = time.monotonic()
    except (KeyboardInterrupt, SystemExit):
        keep()
        raise
    if reached is None:
        raise InputError(f"method {name} yielded no round")
    return reached[0], seconds, curve


def _score(name: str, current: Round, federation: Federation, late: Federation | None) -> float:
    """A point of the curve. The record's metrics are those of `target_metrics`, which refuses to have no test rows."""
    models, tests = (current.models, federation.test) if late is None else (_admitted(name, current, late), late.test)
    scores = [each for each in headline_scores(models, tests, federation.scale) if each is not None]
    return float(np.mean(scores)) if scores else 0.0


def _admitted(name: str, current: Round, late: Federation) -> Sequence[Model]:
    """The models of clients that took no part in training."""
    if current.admit is not None:
        return current.admit(late.train)
    if any(model is not current.models[0] for model in current.models):
        raise InputError(f"method {name} has no model for clients unseen in training; leave it out")
    return [current.models[0]] * len(late.train)


def _norm_of_scores(models: Sequence[Model], federation: Federation) -> float:
    """Of the first client on its own test rows: stays the same while its model does, to rounding."""
    return float(models[0].scores(federation.test[0].features).double().norm())


def save_models(
    models: Sequence[Model],
    folder: Path,
    class_names: Iterable[str],
    clients: Sequence[str] | None = None,
    about: Mapping[str, Any] | None = None,
) -> None:
    """Write one `model_file` for every client; a tensor they all share is written once, beside them.

    Each file says whose model it is, and ``about`` what else there is to know of all.
    The folder is made aside and put in place at the end, so it holds all models of one run or is not there.
    """
    names = [str(k) for k in range(len(models))] if clients is None else list(clients)
    shared = _shared_tensors(models)
    making, former = folder.with_name(f".{folder.name}.making"), folder.with_name(f".{folder.name}.former")
    shutil.rmtree(making, ignore_errors=True)
    try:
        for k, container in enumerate(model.container() for model in models):
            facts = {"client": names[k], **(about or {})}
            settings = container.settings | {"class_names": list(class_names), "about": facts}
            only_one = () if len(models) == 1 else shared
            write(replace(container, settings=settings), making / model_file(k, names[k]), shared=only_one)
        shutil.rmtree(former, ignore_errors=True)
        if folder.exists():
            folder.rename(former)
        making.rename(folder)
    except OSError as error:
        raise InputError(f"cannot write {folder}: {error.strerror or error}; choose another --out") from error
    finally:
        shutil.rmtree(making, ignore_errors=True)
        shutil.rmtree(former, ignore_errors=True)


def _shared_tensors(models: Sequence[Model]) -> list[str]:
    """The names of the tensors that all models have in common; models are looked at one at a time."""
    shared = dict(models[0].container().tensors)
    for model in models:
        own = model.container().tensors
        shared = {name: tensor for name, tensor in shared.items() if own.get(name) is tensor}
    return list(shared)


def versions() -> dict[str, str | None]:
    """The versions a result depends on, and the commit of the source: $APFL_COMMIT, or the checkout's.

    If torch was told to multiply float32 with less precision than it does by itself, that too.
    """
    packages = {name: version(name) for name in ("apfl", "torch", "numpy", "scipy", "scikit-learn")}
    precision = torch.get_float32_matmul_precision()
    coarse = {} if precision == "highest" else {"float32_matmul_precision": precision}
    commit = os.environ.get("APFL_COMMIT") or _git_commit()
    return {"python": platform.python_version(), **packages, **coarse, "git": commit}


def _git_commit() -> str | None:
    here = Path(__file__).parent
    try:
        tracked = subprocess.run(
            ["git", "-C", str(here), "ls-files", "--error-unmatch", Path(__file__).name],
            capture_output=True,
            check=False,
        )
        if tracked.returncode:
            return None  # installed into some other project's checkout: its commit says nothing about us
        described = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return described.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
