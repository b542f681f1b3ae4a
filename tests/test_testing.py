"""`check_method` finds what is wrong with a method, one promise at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

from apfl import InputError, Method, Round, Shard, load_method
from apfl.experiments.tuning import tune
from apfl.testing import check_method


@dataclass(frozen=True)
class Nearest(Method):
    """Nearest class mean, one model for everyone: a method as somebody else would write it."""

    personal: ClassVar[bool] = False

    def rounds(self, clients: Sequence[Shard], n_classes: int, seed: int) -> Iterator[Round]:
        yield from load_method("fedncm").rounds(clients, n_classes, seed)


class Unset(Nearest):
    """Says that models are personal."""

    personal: ClassVar[bool] = True


class Silent(Nearest):
    __doc__ = None


class Free(Nearest):
    """Exchanges something, and counts no bytes."""

    def rounds(self, clients, n_classes, seed):
        for current in super().rounds(clients, n_classes, seed):
            yield replace(current, bytes_up=0)


class Forgetful(Nearest):
    """Another result with each run."""

    def rounds(self, clients, n_classes, seed):
        noisy = [Shard(shard.features + torch.randn_like(shard.features), shard.labels) for shard in clients]
        yield from super().rounds(noisy, n_classes, seed)


class Destructive(Nearest):
    """Writes into the rows it is given."""

    def rounds(self, clients, n_classes, seed):
        yield from super().rounds(clients, n_classes, seed)
        for shard in clients:
            shard.labels.fill_(0)


class Twice(Nearest):
    """Yields more rounds than it says."""

    def rounds(self, clients, n_classes, seed):
        for _ in range(2):
            yield from super().rounds(clients, n_classes, seed)


class Blind(Nearest):
    """Learns from shuffled labels."""

    def rounds(self, clients, n_classes, seed):
        turned = [Shard(shard.features, (shard.labels + 1) % n_classes) for shard in clients]
        yield from super().rounds(turned, n_classes, seed)


class Alone(Nearest):
    """One model for all."""

    def rounds(self, clients, n_classes, seed):
        for current in super().rounds(clients, n_classes, seed):
            yield replace(current, models=current.models[:1])


class Inviting(Nearest):
    """Promises models to late clients."""

    admits: ClassVar[bool] = True


class Misnamed(Nearest):
    """Has a grid over what is no setting."""

    @property
    def grid(self) -> Mapping[str, Sequence[Any]]:
        return {"gamma": (1.0,)}


class Careless(Nearest):
    """Accepts a federation of nobody."""

    def rounds(self, clients, n_classes, seed):
        return super().rounds(clients, n_classes, seed) if clients else iter(())


def test_a_sound_method_passes():
    check_method(Nearest)
    check_method(Nearest())


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        (Unset, "personal is True, but its clients' models are the same"),
        (Silent, "no docstring"),
        (Free, "1 exchanges and 0 bytes up"),
        (Forgetful, "other models when it is run again"),
        (Destructive, "other models|changes the rows"),
        (Twice, "yields 2 rounds, and n_rounds is 1"),
        (Blind, "any linear classifier"),
        (Alone, "gives 1 models to 3 clients"),
        (Inviting, "no `admit`"),
        (Misnamed, "'gamma', which is not a setting"),
        (Careless, "no clients"),
        (dict, "does not inherit apfl.Method"),
    ],
)
def test_a_broken_method_is_told_what_is_wrong(broken, sentence):
    with pytest.raises(AssertionError, match=sentence):
        check_method(broken)


def test_hooks_have_defaults():
    """A method of one exchange writes nothing but `rounds`."""
    method = Nearest()
    assert (method.grid, method.n_rounds, method.chooses, method.admits) == (None, 1, False, False)
    assert method.widths(100, 8) == (8, 0)
    with pytest.raises(InputError, match="cannot continue from a checkpoint"):
        method.resume({}, [], 3, 0)


@dataclass(frozen=True)
class Ridge(Method):
    """Ridge at home with a grid, and without the setting `normalise`."""

    gamma: float = 1.0

    grid: ClassVar[Mapping[str, Any]] = {"gamma": (1e9, 1.0)}

    def rounds(self, clients: Sequence[Shard], n_classes: int, seed: int) -> Iterator[Round]:
        yield from load_method("local_ridge", d=40, gamma=self.gamma).rounds(clients, n_classes, seed)


def test_a_grid_without_normalise_is_tuned_over_its_own_settings_alone():
    centres = 4 * torch.eye(3, 8)
    labels = torch.arange(40) % 3
    generator = torch.Generator().manual_seed(0)
    clients = [Shard(centres[labels] + 2 * torch.randn(40, 8, generator=generator), labels) for _ in range(3)]
    tuned = tune(Ridge(), clients, 3, 0)
    assert [set(result) for result in tuned.results] == [{"gamma", "accuracy_client_mean"}] * 2
    best = max(tuned.results, key=lambda result: result["accuracy_client_mean"])
    assert tuned.method == Ridge(best["gamma"])
