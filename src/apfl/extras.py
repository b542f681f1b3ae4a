"""Libraries that only some uses need: imported where they are used, and a clear line where they are missing."""

from __future__ import annotations

import importlib
from typing import Any

from apfl.errors import InputError

__all__ = ["optional"]


def optional(module: str, extra: str) -> Any:
    """The module, or an error that says what to install.

    >>> optional("json", "hub").dumps([1])
    '[1]'
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise InputError(f"{package} cannot be imported ({error}); install it: pip install 'apfl[{extra}]'") from error
