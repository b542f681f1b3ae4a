from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from threadpoolctl import threadpool_limits

from apfl.data.federation import Shard

# Drawn sizes make single examples slow now and then on a loaded machine; that says nothing about the code.
settings.register_profile("default", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("default")

# One BLAS thread for each test process: they run side by side, and small products gain nothing from more.
torch.set_num_threads(1)
threadpool_limits(1)

# A shell that starts the tests in the background has Ctrl-C ignored, by everything they start too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

SHARED = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture
def cifar100() -> Path:
    path = SHARED / "cifar100-efficientnet-lite0.npz"
    if not path.exists():
        pytest.skip(f"needs {path}, which is not part of the project")
    return path


def draw_clients(
    sizes: list[int], n_features: int, n_classes: int, seed: int, dtype: torch.dtype = torch.float64
) -> list[Shard]:
    """Clients with random rows; small ones lack classes, as real ones do."""
    rng = np.random.default_rng(seed)
    return [
        Shard(
            torch.from_numpy(rng.normal(size=(n, n_features))).to(dtype),
            torch.from_numpy(rng.integers(n_classes, size=n)),
        )
        for n in sizes
    ]
