"""The settings that the gradient methods share, and their rounds.

A method is three functions over an immutable state: `start`, `advance` by one round, and `heads`, what is evaluated.
The state is all there is, so a run can stop after any round and go on later from a file.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from apfl.data.federation import Shard
from apfl.data.targets import Target
from apfl.errors import InputError
from apfl.maths.normalise import Normalise
from apfl.methods import Method, Round
from apfl.methods._analytic import ANY_TARGET
from apfl.methods._stack import Stack
from apfl.methods._step import Params
from apfl.models.linear_head import LinearHead

State = dict[str, Params]
RATES = (0.01, 0.03, 0.1, 0.3)


@dataclass(frozen=True)
class Training(Method):
    """Local epochs of SGD on a head, round by round; the defaults are the paper's where it gives any."""

    lr: Annotated[float, Field(gt=0)] = 0.1
    epochs: Annotated[int, Field(gt=0)] = 3  # local, in each round
    n_rounds: Annotated[int, Field(gt=0)] = 200
    batch: Annotated[int, Field(gt=0)] = 64
    adapter: Annotated[int, Field(ge=0)] = 0  # width of a trainable Linear -> ReLU beneath the head; 0 for none
    participation: Annotated[float, Field(gt=0, le=1)] = 1.0  # share of the clients sampled for each round
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0  # chance that a sampled client is lost for the round
    normalise: Normalise = "root"  # as apfl has it

    # Settings that each of several grid points trained in one stack has for itself; in the others they must agree.
    stacked: ClassVar[frozenset[str]] = frozenset({"lr"})
    predicts: ClassVar[Sequence[Target]] = ANY_TARGET
    unit: ClassVar[bool] = False  # whether its models bring representations to length one, as `LinearHead` can

    @property
    def finetune_epochs(self) -> int:
        """Epochs on each client's own rows after the last round."""
        return 0

    @abstractmethod
    def start(self, stack: Stack) -> State:
        """The state before the first round."""

    @abstractmethod
    def advance(self, stack: Stack, state: State, t: int) -> State:
        """The state after round ``t``, counted from 0."""

    @abstractmethod
    def heads(self, stack: Stack, state: State, t: int) -> Mapping[str, Tensor]:
        """What is evaluated after ``t`` rounds: a tensor for each grid point, or for each head."""

    def rounds(self, clients: Sequence[Shard], n_classes: int, seed: int) -> Iterator[Round]:
        for (only,) in stacked_rounds([self], clients, n_classes, seed):
            yield only

    def resume(
        self, state: Mapping[str, Tensor], clients: Sequence[Shard], n_classes: int, seed: int
    ) -> Iterator[Round]:
        for (only,) in stacked_rounds([self], clients, n_classes, seed, state):
            yield only


def stacked_rounds(
    points: Sequence[Training],
    clients: Sequence[Shard],
    n_classes: int,
    seed: int,
    resume: Mapping[str, Tensor] | None = None,
) -> Iterator[list[Round]]:
    """The rounds of several grid points of one method, trained side by side."""
    method, stack = points[0], Stack(points, clients, n_classes, seed)
    for t, state in _states(method, stack, resume):
        with _enough_threads(stack):
            heads = method.heads(stack, state, t)
        if len(points) == 1:  # of a grid, the points that diverge lose
            _refuse_divergence(method, heads, t)
        packed = _pack(state, stack, t)
        yield [
            Round(
                _models(stack, heads, point),
                index=(t if stack.bytes_up > stack.prelude else 0) + bool(stack.prelude),
                bytes_up=stack.bytes_up,
                bytes_down=stack.bytes_down,
                state=packed,
                admit=_admission(method, stack, state, t) if len(points) == 1 and set(state) == {"global"} else None,
            )
            for point in range(len(points))
        ]


def _states(method: Training, stack: Stack, resume: Mapping[str, Tensor] | None) -> Iterator[tuple[int, State]]:
    """The number of rounds and the state after each; first the one to resume from, if there is one."""
    with _enough_threads(stack):
        t, state = (0, method.start(stack)) if resume is None else _unpack(resume, stack)
    if resume is not None:
        yield t, state
    while t < method.n_rounds:
        with _enough_threads(stack):
            state = method.advance(stack, state, t)
        t += 1
        yield t, state


def _refuse_divergence(method: Training, heads: Mapping[str, Tensor], t: int) -> None:
    for name, p in heads.items():
        if name != "bias" and not bool(torch.isfinite(p.sum())):
            scale = ", or normalise='row'" if method.normalise == "none" else ""
            raise InputError(f"training diverged in round {t} (lr {method.lr:g}): use a smaller lr{scale}")


def _admission(method: Training, stack: Stack, state: State, t: int) -> Callable[[Sequence[Shard]], list[LinearHead]]:
    """For clients that come later: what the method makes of the shared model with their own rows, if anything."""

    def admit(late: Sequence[Shard]) -> list[LinearHead]:
        own = Stack([method], late, stack.n_classes, stack.seed, stack.normaliser)
        return _models(own, method.heads(own, state, t), 0)

    return admit


@contextmanager
def _enough_threads(stack: Stack) -> Iterator[None]:
    """One thread where a step is so small that a second would only wait (ten times slower on a busy machine)."""
    step = min(stack.block, len(stack.sizes)) * stack.points[0].batch * stack.features.shape[1] * stack.n_classes
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if step * len(stack.points) < 1e7 else threads)
        yield
    finally:
        torch.set_num_threads(threads)


def _models(stack: Stack, heads: Mapping[str, Tensor], point: int) -> list[LinearHead]:
    """A model for each client, in the clients' own order; a tensor they share is one object."""
    n_points = len(stack.points)
    shared = {name: _flat(name, p[point]) for name, p in heads.items() if len(p) == n_points}
    own = {name: p for name, p in heads.items() if len(p) != n_points}
    if not own:
        return [_head(stack, shared)] * len(stack.sizes)
    models: dict[int, LinearHead] = {}
    for place, k in enumerate(stack.order):
        mine = {name: _flat(name, p[place * n_points + point]) for name, p in own.items()}
        models[k] = _head(stack, shared | mine)
    return [models[k] for k in range(len(models))]


def _head(stack: Stack, tensors: Mapping[str, Tensor]) -> LinearHead:
    if stack.target == "multilabel":  # a label whose logit is above 0 has a score above 0.5, as with every method
        tensors = {**tensors, "bias": tensors["bias"] + 0.5}
    return LinearHead(**tensors, unit=stack.points[0].unit, normaliser=stack.normaliser)  # type: ignore[arg-type]


def _flat(name: str, tensor: Tensor) -> Tensor:
    return tensor if name.endswith("weight") else tensor[0]


def _pack(state: State, stack: Stack, t: int) -> dict[str, Tensor]:
    progress = torch.tensor([t, stack.bytes_up, stack.bytes_down])
    return {f"{part}.{name}": p for part, params in state.items() for name, p in params.items()} | {
        "progress": progress
    }


def _unpack(packed: Mapping[str, Tensor], stack: Stack) -> tuple[int, State]:
    state: State = {}
    for key, tensor in packed.items():
        part, _, name = key.partition(".")
        if name:
            state.setdefault(part, {})[name] = tensor.to(stack.features.device)
    t, stack.bytes_up, stack.bytes_down = packed["progress"].tolist()
    return t, state
