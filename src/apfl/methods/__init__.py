"""One file for each method; its name is the file's name everywhere: here, on the command line, in a plan.

A method from outside is found by its entry point of the group ``apfl.methods``, or by its path, ``./mine.py:Mine``.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from types import ModuleType
from typing import Any, ClassVar

from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from apfl.data.federation import Shard
from apfl.data.registry import Registry
from apfl.data.targets import Target
from apfl.errors import InputError, allowed_in_words, unknown
from apfl.models.file import Model

__all__ = ["METHODS", "Method", "Round", "check_predicts", "load_method", "method_class", "method_names"]


@dataclass(frozen=True, eq=False)
class Round:
    """Where a method stands after some exchanges between server and clients.

    >>> import apfl
    >>> data = apfl.federation("digits", clients=3)
    >>> (last,) = load_method("local_ridge", d=64).rounds(data.train, data.n_classes, seed=0)
    >>> last
    Round(0: 3 models, 0 bytes up, 0 down)
    """

    models: Sequence[Model]  # one for each client, in their order
    index: int  # server -> client -> server exchanges so far; 0 if there were none
    bytes_up: int = 0  # so far, over all clients
    bytes_down: int = 0
    chosen: Mapping[str, Any] = field(default_factory=dict)  # what the method settled by itself
    state: Mapping[str, Tensor] | None = None  # what `Method.resume` needs to continue from here, if it can
    primary: Model | None = None  # the shared stream alone, if the models do not hold it apart
    # Models of clients that come after training, from their own training rows. Without it a later client can only be
    # given the shared model, where there is one.
    admit: Callable[[Sequence[Shard]], Sequence[Model]] | None = None

    def __repr__(self) -> str:
        return f"Round({self.index}: {len(self.models)} models, {self.bytes_up} bytes up, {self.bytes_down} down)"


@dataclass(frozen=True)
class Method(ABC):
    """A federated method: a frozen dataclass whose fields are its settings. Only `rounds` must be written.

    Everything else has a default that suits a method of one exchange without a grid. `apfl.testing.check_method`
    checks a method of your own.

    >>> @dataclass(frozen=True)
    ... class Narrow(Method):
    ...     d: int = 16
    ...
    ...     def rounds(self, clients, n_classes, seed):
    ...         yield from load_method("local_ridge", d=self.d).rounds(clients, n_classes, seed)
    >>> import apfl
    >>> apfl.run("digits", Narrow(d=8), clients=5, seeds=1).records[0].settings
    {'d': 8}
    """

    admits: ClassVar[bool] = False  # whether its rounds have `Round.admit`: personal models for clients that come late

    @abstractmethod
    def rounds(self, clients: Sequence[Shard], n_classes: int, seed: int) -> Iterator[Round]:
        """Train; yield after every round. The last one yielded is the result."""

    def resume(
        self, state: Mapping[str, Tensor], clients: Sequence[Shard], n_classes: int, seed: int
    ) -> Iterator[Round]:
        """Continue from `Round.state` of the same run: yield that round again, then the next ones."""
        raise InputError(f"{type(self).__name__} cannot continue from a checkpoint; remove it to start anew")

    def together(
        self, points: Sequence[Any], clients: Sequence[Shard], n_classes: int, seed: int
    ) -> Iterator[tuple[int, Round]]:
        """The place and the last round of each of several settings of this method, for a grid: one after the other.

        Override it if several settings share work.
        """
        for place, point in enumerate(points):
            (*_, last) = point.rounds(clients, n_classes, seed)
            yield place, last

    @property
    def personal(self) -> bool:
        """Whether clients end up with different models."""
        return True

    @property
    def predicts(self) -> Sequence[Target]:
        """What it can be trained for. With numbers or several labels, shards have ``targets`` (n, c), float64.

        A model's scores are then those numbers, or above 0.5 for a label that the row has.
        """
        return ("classification",)

    def check_target(self, target: Target) -> None:  # noqa: B027 (most methods have nothing to refuse)
        """Refuse settings that are of no use for this kind of target."""

    @property
    def grid(self) -> Mapping[str, Sequence[Any]] | None:
        """The values that ``--tune`` tries for each setting; None if it has nothing to tune.

        A method with a grid and the setting ``normalise`` is tuned over the normalisations too.
        """
        return None

    @property
    def n_rounds(self) -> int:
        """The number of rounds it yields."""
        return 1

    def widths(self, n_samples: int, n_features: int) -> tuple[int, int]:
        """d_P and d_R on this many rows and features: how much memory and time a run takes depends on them."""
        return n_features, 0

    @property
    def chooses(self) -> bool:
        """Whether it chooses settings by itself in closed form, which takes longer."""
        return False


def _class_in(module: ModuleType) -> type[Method]:
    """The one method that a file has."""
    own = [
        value
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, Method)
        and value.__module__ == module.__name__ and not name.startswith("_")
    ]  # fmt: skip
    if len(own) != 1:
        raise InputError(f"{len(own)} classes that inherit apfl.Method are in {module.__file__}; name one: FILE:CLASS")
    return own[0]


METHODS = Registry("method", "apfl.methods", "apfl.methods", _class_in)


def method_names() -> list[str]:
    """The methods there are: the public files of this folder, and those of installed distributions.

    >>> {"apfl", "fedavg"} <= set(method_names())
    True
    """
    return METHODS.names()


def method_class(name: str) -> type[Method]:
    """The settings dataclass of a method, by name or by path."""
    cls = METHODS.load(name)
    if not (inspect.isclass(cls) and issubclass(cls, Method) and is_dataclass(cls)) or inspect.isabstract(cls):
        raise InputError(
            f"method {name} is {cls!r}; it must be a dataclass that inherits apfl.Method and has `rounds`: "
            "@dataclass(frozen=True) class Mine(apfl.Method)"
        )
    return cls


def load_method(name: str, **settings: Any) -> Method:
    """A method by name or path with some settings changed; values may be strings, as on the command line.

    >>> load_method("apfl", balance="0.3").balance
    0.3
    >>> load_method("apfl", gama=1)
    Traceback (most recent call last):
    apfl.errors.InputError: no setting of apfl 'gama'; did you mean 'gamma'? (have: ...)
    >>> load_method("apfl", gamma=-1)
    Traceback (most recent call last):
    apfl.errors.InputError: apfl.gamma=-1 given; allowed: a number greater than 0 or 'auto'
    """
    cls, own = method_class(name), METHODS.name_of(name)
    known = [field.name for field in fields(cls)]
    for key in settings:
        if key not in known:
            raise unknown(f"setting of {own}", key, known)
    try:
        method: Method = TypeAdapter(cls).validate_python(settings)
    except ValidationError as error:
        raise _bad_setting(own, settings, error) from error
    for key, value in vars(method).items():  # for every method at once: no setting of any of them may be infinite
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{own}.{key}={value} given; it must be a finite number")
    return method


def check_predicts(name: str, method: Method, target: Target) -> None:
    """Refuse a method that has no answer to this kind of target.

    >>> check_predicts("fedncm", load_method("fedncm"), "regression")
    Traceback (most recent call last):
    apfl.errors.InputError: fedncm cannot be trained for regression: it needs classes; leave it out, or use ...
    """
    if target in method.predicts:
        method.check_target(target)
        return
    able = [each for each in method_names() if target in load_method(each).predicts]
    raise InputError(
        f"{name} cannot be trained for {target}: it needs classes; leave it out, or use one of {', '.join(able)}"
    )


def _bad_setting(name: str, settings: Mapping[str, Any], error: ValidationError) -> InputError:
    """The first setting that is wrong, its value, and what is allowed; or what the method's own check says."""
    first, *_ = problems = error.errors()
    own_check = not first["msg"].startswith("Input should")
    if (own_check and first["type"] != "missing") or not first["loc"]:
        return InputError(f"{name}: {first['msg'].removeprefix('Value error, ')}")
    key = str(first["loc"][0])  # what follows it names pydantic's own types
    if key not in settings:
        return InputError(f"{name}.{key} is missing; it has no default, so give a value")
    allowed = allowed_in_words(problem for problem in problems if problem["loc"][:1] == (key,))
    return InputError(f"{name}.{key}={settings[key]!r} given; allowed: {allowed}")
