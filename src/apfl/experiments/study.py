"""Several methods on one federation, dealt out anew for each seed: what `apfl run` and `apfl.run` do."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from apfl.data.federation import Dataset, Federation
from apfl.data.fitted_features import about_features
from apfl.data.protocol import Protocol, federate
from apfl.data.targets import about_targets
from apfl.errors import InputError
from apfl.experiments.metrics import no_test_rows
from apfl.experiments.record import Record, as_read, hashes, keep_record, read_records, user_files, with_hashes
from apfl.experiments.run import run, save_models, train
from apfl.experiments.tuning import tune_once
from apfl.files import replacing
from apfl.methods import METHODS, Method, check_predicts, load_method, method_class, method_names

__all__ = [
    "DEFAULT_METHODS",
    "Study",
    "chosen_methods",
    "execute",
    "going_alone",
    "leave_no_empty",
    "model_folder",
    "tuned",
]

DEFAULT_METHODS = ("local_ridge", "afl", "central", "apfl_paper", "apfl")
Show = Callable[[str, str], None]  # is told what is being done, and how far it has got


def quietly(what: str, detail: str) -> None:
    """Show nothing."""


@dataclass(frozen=True, eq=False)
class Study:
    """What is run, and where records, models and checkpoints go."""

    dataset: Dataset
    protocol: Protocol
    methods: Mapping[str, Method]
    seeds: Sequence[int]
    folder: Path
    device: torch.device | str = "cpu"
    save: bool = True  # every client's model
    source: Mapping[str, Any] = field(default_factory=dict)  # where `apfl rerun` finds the same data

    @cached_property
    def federations(self) -> dict[int, Federation]:
        """The federation of each seed. Refuses what cannot be dealt out, and what would leave neither record nor model.

        --test-fraction 0 asks for models without test rows; having none in any other way is a mistake.
        """
        for name, method in self.methods.items():
            check_predicts(name, method, self.dataset.target)
        dealt = {seed: federate(self.dataset, self.protocol, seed) for seed in self.seeds}
        without_tests = not _any_test_rows(dealt)
        if without_tests and (self.protocol.test_fraction or self.protocol.test_column is not None):
            raise no_test_rows()
        if without_tests and not self.save:
            raise InputError("--test-fraction 0 and --no-save-models given: nothing would be left; drop one of them")
        return dealt

    @property
    def measured(self) -> bool:
        """Whether there are test rows, and so records."""
        return _any_test_rows(self.federations)


def _any_test_rows(federations: Mapping[int, Federation]) -> bool:
    return any(len(shard) for federation in federations.values() for shard in federation.test)


def chosen_methods(
    methods: Iterable[str | Method | type[Method]], settings: Mapping[str, Mapping[str, Any]]
) -> dict[str, Method]:
    """Methods by what records call them: given by name, by path, as objects or as classes; with these settings."""
    methods = list(methods)
    if not methods:
        raise InputError(f"no method given; name at least one (have: {', '.join(method_names())})")
    objects = [each for each in methods if isinstance(each, Method)]
    own = {METHODS.adopt(type(each)): each for each in objects}
    if len(own) < len(objects):
        raise InputError("two methods of one class given; records could not tell them apart: run them one by one")
    wanted = METHODS.by_name(_name(each) for each in methods)
    for name, given in wanted.items():
        method_class(given)
        _check_settings(name, settings.get(name, {}))
    for name in settings:
        if name not in wanted:
            method_class(name)
            raise InputError(f"settings for {name} given, which is not run; add it to the methods")
    return {name: _method(given, own.get(name), settings.get(name, {})) for name, given in wanted.items()}


def _name(method: str | Method | type[Method]) -> str:
    if isinstance(method, str):
        return method
    if not isinstance(method, Method) and not (isinstance(method, type) and issubclass(method, Method)):
        raise InputError(f"{method!r} given as a method; give a name, a path, or what inherits apfl.Method")
    return METHODS.adopt(type(method) if isinstance(method, Method) else method)


def _check_settings(name: str, settings: Any) -> None:
    if not isinstance(settings, Mapping):
        raise InputError(f"settings of {name} are {settings!r}; give names and values, for example {{'gamma': 1.0}}")


def _method(name: str, given: Method | None, settings: Mapping[str, Any]) -> Method:
    if given is None:
        return load_method(name, **settings)
    return load_method(name, **(asdict(given) | dict(settings))) if settings else given


def tuned(study: Study, show: Show = quietly, on_tuned: Callable[[str], None] = lambda name: None) -> Study:
    """The study with the settings that tuning chose on the first seed, kept in FOLDER/tuning.jsonl."""
    federation = study.federations[study.seeds[0]].to(study.device)
    _check_folder(replace(study, methods={}))
    return replace(study, methods=dict(_each_tuned(study, federation, show, on_tuned)))


def _each_tuned(
    study: Study, federation: Federation, show: Show, on_tuned: Callable[[str], None]
) -> Iterator[tuple[str, Method]]:
    path, seed = study.folder / "tuning.jsonl", study.seeds[0]
    for name, method in study.methods.items():
        show(f"tuning {name}", "")
        run_on = [study.dataset.sha256, as_read(asdict(study.protocol))]
        tuned_method = tune_once(
            path, name, method, federation.train, federation.n_classes, seed,
            with_hashes(run_on, user_files(method, study.protocol)),
            on_round=lambda share, name=name: show(f"tuning {name}", f"{share:.0%}"),  # type: ignore[misc]
            checkpoint=study.folder / "checkpoints" / f"tuning-{name}.safetensors",
        )  # fmt: skip
        if tuned_method.results:  # it has something to tune
            on_tuned(name)
        yield name, tuned_method.method


def execute(study: Study, show: Show = quietly) -> Iterator[Record]:
    """Run every method with every seed; a record is yielded when it and its models are on disk.

    Without test rows there are models alone. What can be refused is refused before anything is run or written.
    """
    federations = study.federations
    _check_folder(study)
    for seed, federation in federations.items():
        on_device = federation.to(study.device)
        for name, method in study.methods.items():
            record = _run_one(study, on_device, name, method, seed, show)
            if record is not None:
                yield record


def going_alone(study: Study, show: Show = quietly) -> Iterator[Record]:
    """What each client reaches by itself: a ridge on its own rows, chosen by left-out rows; a record for each seed.

    Nothing is written. What clients gain is measured against it, not against a ridge that suits nobody.
    """
    alone = load_method("local_ridge", gamma="auto", normalise="auto", intercept=True)
    for seed, federation in study.federations.items():
        show(f"seed {seed}  going alone", "")
        yield run("local_ridge", alone, federation.to(study.device), study.dataset, study.protocol, seed)[0]


def _run_one(study: Study, federation: Federation, name: str, method: Method, seed: int, show: Show) -> Record | None:
    what, checkpoint = f"seed {seed}  {name}", study.folder / "checkpoints" / f"{name}-seed-{seed}.safetensors"
    show(what, "")
    of_run = name, method, federation, study.dataset, study.protocol, seed
    how: dict[str, Any] = {"checkpoint": checkpoint, "on_round": lambda reached: show(what, f"round {reached.index}")}
    record, models = run(*of_run, **how) if study.measured else (None, train(*of_run, **how))
    if study.save:
        show(what, "writing models")
        about = {"method": name, "seed": seed, **about_features(study.dataset, study.protocol, seed)}
        about |= about_targets(federation.target, federation.scale)
        place = model_folder(study.folder, name, seed)
        save_models(models, place, study.dataset.class_names, federation.names, about)
    if record is not None:
        record = replace(record, source=dict(study.source))
        keep_record(record, study.folder / "records.jsonl")
    checkpoint.unlink(missing_ok=True)
    return record


def model_folder(folder: Path, method: str, seed: int) -> Path:
    """Where the models of one record are."""
    return folder / "models" / method / f"seed-{seed}"


def leave_no_empty(folder: Path) -> None:
    """Remove the folder of a study that wrote nothing."""
    with suppress(OSError):  # there is something in it, or it was never made
        folder.rmdir()


def _check_folder(study: Study) -> None:
    """Refuse a folder that cannot be written or that holds records of something else."""
    protocol = as_read(asdict(study.protocol))
    for record in read_records(study.folder / "records.jsonl"):
        planned = study.methods.get(record.method) if record.seed in study.seeds else None
        same_data = record.data_sha256 == study.dataset.sha256 and dict(record.protocol) == protocol
        if not same_data or (planned is not None and not _same_method(record, planned, study.protocol)):
            raise InputError(
                f"{study.folder} holds records of another run ({record.method}, seed {record.seed}, {record.data}); "
                "choose another --out, or remove it first"
            )
    probe = study.folder / f".write-test-{time.time_ns()}"
    with replacing(probe) as temporary:
        temporary.touch()
    probe.unlink()


def _same_method(record: Record, planned: Method, protocol: Protocol) -> bool:
    same_files = hashes(record.files) == hashes(user_files(planned, protocol))
    return same_files and dict(record.settings) == as_read(asdict(planned))
