"""A whole federation on this machine, in Flower's simulation engine: the same two apps, without a network."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from apfl.data.federation import Dataset, Federation
from apfl.data.load import Source, load_data
from apfl.data.targets import Scale
from apfl.errors import InputError
from apfl.experiments.run import Protocol, federate
from apfl.federate import Coordinator, Terms
from apfl.federate.flower.client_app import SIMULATED_TARGET, SIMULATION
from apfl.federate.flower.events import WORDS
from apfl.federate.flower.processes import QUIET
from apfl.federate.terms import FEWEST_LATE
from apfl.files import replacing

__all__ = ["simulate"]

AS_IT_IS = Scale(torch.zeros(1), torch.ones(1))


def simulate(
    folder: Path, source: Source, protocol: Protocol, seed: int, terms: Terms, *, as_json: bool = False
) -> dict[str, str]:
    """Deal the rows out to sites under ``folder``, and run the federation until every site has its model.

    Returns the client of each site.
    """
    dataset = load_data(replace(source, target=source.target or "classification"))
    federation = federate(dataset, protocol, seed)
    if len(federation.train) < 2:
        raise InputError(f"the column names one client, {federation.names[0]}; a federation needs two or more")
    terms = replace(terms, quorum=len(federation.train))
    if dataset.target != "classification":
        terms = replace(terms, target=dataset.target, class_names=dataset.class_names, min_cohort=FEWEST_LATE)
    if (folder / "ledger.sqlite").exists():
        raise InputError(f"{folder} holds a federation already; choose another --out")
    folder.mkdir(parents=True, exist_ok=True)
    with Coordinator(folder, terms):
        pass
    names = {f"site-{number:03d}": name for number, name in enumerate(federation.names)}
    for number, site in enumerate(names):
        _write_site(folder / "sites" / site / "features.npz", federation, number, dataset)
    os.environ |= {**QUIET, SIMULATION: str(folder.absolute()), "APFL_FEDERATION": str(folder.absolute())}
    os.environ[SIMULATED_TARGET] = dataset.target
    os.environ |= {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", **({} if as_json else {WORDS: "1"})}
    from flwr.simulation import run_simulation

    from apfl.federate.flower.client_app import app as client_app
    from apfl.federate.flower.server_app import app as server_app

    for name in ("flwr", "apfl.federate"):  # the events say it all
        logging.getLogger(name).setLevel(logging.ERROR)
    run_simulation(
        server_app, client_app, num_supernodes=len(federation.train),
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )  # fmt: skip
    return names


def _write_site(path: Path, federation: Federation, number: int, dataset: Dataset) -> None:
    """One site's rows as a file, with a column that says which are for testing."""
    train, test = federation.train[number], federation.test[number]
    labels = [train.labels.numpy(), test.labels.numpy()]
    if dataset.target != "classification":
        labels = [(federation.scale or AS_IT_IS).undo(own.responses(0)).numpy() for own in (train, test)]
    with replacing(path) as temporary, temporary.open("wb") as stream:
        np.savez(
            stream,
            features=np.concatenate([train.features.numpy(), test.features.numpy()]),
            labels=np.concatenate(labels),
            class_names=np.array(dataset.class_names),
            test=np.arange(len(train) + len(test)) >= len(train),
        )
