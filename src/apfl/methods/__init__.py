"""One file for each method; its name is the file's name everywhere: here, on the command line, in a plan."""

from __future__ import annotations

import importlib
import math
import pkgutil
from dataclasses import fields, is_dataclass
from typing import Any

from pydantic import TypeAdapter, ValidationError

from apfl.data.federation import Method
from apfl.errors import InputError, unknown

__all__ = ["load_method", "method_class", "method_names"]


def method_names() -> list[str]:
    """The methods there are: the public files of this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def method_class(name: str) -> type[Any]:
    """The settings dataclass of a method: the one class in its file that has ``rounds``."""
    if name not in method_names():
        raise unknown("method", name, method_names())
    module = importlib.import_module(f"{__name__}.{name}")
    (found,) = (
        value
        for value in vars(module).values()
        if is_dataclass(value)
        and isinstance(value, type)
        and value.__module__ == module.__name__
        and hasattr(value, "rounds")
    )
    return found


def load_method(name: str, **settings: Any) -> Method:
    """A method by name with some settings changed; values may be strings, as on the command line.

    >>> load_method("apfl", balance="0.3").balance
    0.3
    >>> load_method("apfl", gama=1)
    Traceback (most recent call last):
    apfl.errors.InputError: no setting of apfl 'gama'; did you mean 'gamma'? (have: ...)
    """
    cls = method_class(name)
    known = [field.name for field in fields(cls)]
    for key in settings:
        if key not in known:
            raise unknown(f"setting of {name}", key, known)
    try:
        method: Method = TypeAdapter(cls).validate_python(settings)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(str(part) for part in problem["loc"])
        raise InputError(f"{name}.{key}={problem['input']!r}: {problem['msg']}") from error
    for key, value in vars(method).items():  # for every method at once: no setting of any of them may be infinite
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"{name}.{key}={value} given; it must be a finite number")
    return method
