"""Analytic personalised federated learning: one good model for each site, without gradients.

>>> import torch
>>> import apfl
>>> stats = apfl.statistics(torch.eye(2), torch.eye(2))
>>> apfl.solve(stats + stats, ridge=2.0).diagonal().tolist()  # two clients with the same rows
[0.5, 0.5]
"""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING

from apfl.errors import names_in

if TYPE_CHECKING:
    from apfl.data.encoder import Encoder
    from apfl.data.federation import Dataset, Federation, Shard
    from apfl.data.given import federation
    from apfl.data.load import load_data
    from apfl.data.source import Source
    from apfl.errors import InputError
    from apfl.experiments.metrics import client_accuracies, metrics
    from apfl.experiments.record import Record
    from apfl.maths.leaveout import fit_refinement
    from apfl.maths.maps import FeatureMap, random_map
    from apfl.maths.ridge import Statistics, solve, statistics
    from apfl.methods import Method, Round, load_method, method_names
    from apfl.methods._estimator import APFLClassifier, APFLRegressor
    from apfl.models.dual_stream import DualStream
    from apfl.models.file import Model, load_model
    from apfl.report.runs import RunResults, run

# Where each name lives. They are imported when first used: torch and scikit-learn take seconds to start, and a
# federation between machines starts many processes, most of which only pass bytes on.
HOMES = {
    "data.encoder": "Encoder",
    "data.federation": "Dataset Federation Shard",
    "data.given": "federation",
    "data.load": "load_data",
    "data.source": "Source",
    "errors": "InputError",
    "experiments.metrics": "client_accuracies metrics",
    "experiments.record": "Record",
    "maths.leaveout": "fit_refinement",
    "maths.maps": "FeatureMap random_map",
    "maths.ridge": "Statistics solve statistics",
    "methods": "Method Round load_method method_names",
    "methods._estimator": "APFLClassifier APFLRegressor",
    "models.dual_stream": "DualStream",
    "models.file": "Model load_model",
    "report.runs": "RunResults run",
}

__version__ = version("apfl")

__all__ = [
    "APFLClassifier",
    "APFLRegressor",
    "Dataset",
    "DualStream",
    "Encoder",
    "FeatureMap",
    "Federation",
    "InputError",
    "Method",
    "Model",
    "Record",
    "Round",
    "RunResults",
    "Shard",
    "Source",
    "Statistics",
    "client_accuracies",
    "federation",
    "fit_refinement",
    "load_data",
    "load_method",
    "load_model",
    "method_names",
    "metrics",
    "random_map",
    "run",
    "solve",
    "statistics",
]


__getattr__ = names_in("apfl", HOMES)
