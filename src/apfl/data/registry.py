"""Find a thing by name: a file of a package, an entry point of an installed distribution, or a path ``./mine.py:Mine``.

Methods, partitions, sources and backbones are all found this way.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from apfl.errors import InputError, unknown

__all__ = ["Registry", "is_path"]

_PATH = re.compile(r"(?P<file>.+\.py)(:(?P<attribute>\w+))?")


def is_path(name: str) -> bool:
    """Whether a name is a Python file, with or without the name of something in it.

    >>> is_path("./mine.py:Mine"), is_path("mine.py"), is_path("apfl")
    (True, True, False)
    """
    return _PATH.fullmatch(name) is not None


@dataclass(frozen=True)
class Registry:
    """All things of one kind, for instance all methods."""

    kind: str  # the noun in messages: "method"
    package: str  # the package whose public files are the built-in things; each file's name is its name
    group: str  # the group of entry points: "apfl.methods"
    pick: Callable[[ModuleType], Any]  # the thing in a module; raises AttributeError or InputError if it has none

    def builtin(self) -> list[str]:
        """The names of the public files of the package."""
        folder = import_module(self.package).__path__
        return sorted(module.name for module in iter_modules(folder) if not module.name.startswith("_"))

    def names(self) -> list[str]:
        """All names: built-in, and from installed distributions."""
        return sorted({*self.builtin(), *(entry.name for entry in entry_points(group=self.group))})

    def load(self, name: str) -> Any:
        """The thing of this name, or at this path."""
        if is_path(name):
            return self._from_path(name)
        entries, builtin = list(entry_points(group=self.group, name=name)), name in self.builtin()
        if len(entries) + builtin > 1:
            homes = ["apfl itself"] * builtin + [_distribution(entry) for entry in entries]
            raise InputError(f"{self.kind} '{name}' is in {' and in '.join(homes)}; uninstall or rename all but one")
        if entries:
            return self._from_entry(entries[0])
        if not builtin:
            raise unknown(self.kind, name, self.names())
        return self.pick(import_module(f"{self.package}.{name}"))

    def name_of(self, name: str) -> str:
        """What records call it: a name as it is, a path by the attribute or else the file.

        >>> Registry("method", "apfl.methods", "apfl.methods", vars).name_of("./mine.py:Mine")
        'Mine'
        """
        match = _PATH.fullmatch(name)
        if match is None:
            return name
        own = match["attribute"] or Path(match["file"]).stem
        if own in self.names():
            raise InputError(f"{self.kind} {name} given; '{own}' is the name of an installed {self.kind}: rename yours")
        return own

    def _from_entry(self, entry: EntryPoint) -> Any:
        try:
            return self._thing(entry.load())
        except Exception as error:  # whatever somebody else's module raises while it is imported
            raise InputError(
                f"{self.kind} '{entry.name}' ({entry.value}) of {_distribution(entry)} cannot be loaded "
                f"({type(error).__name__}: {error}); repair or uninstall that distribution"
            ) from error

    def _from_path(self, name: str) -> Any:
        match = _PATH.fullmatch(name)
        assert match is not None
        self.name_of(name)  # refuses the name of another one
        try:
            module = _module(Path(match["file"]))
            return self._thing(getattr(module, match["attribute"]) if match["attribute"] else module)
        except Exception as error:  # whatever somebody else's file raises while it is imported
            raise InputError(
                f"{self.kind} {name} cannot be loaded ({type(error).__name__}: {error}); "
                f"give a file and a name in it: ./mine.py:Mine"
            ) from error

    def _thing(self, loaded: Any) -> Any:
        return self.pick(loaded) if isinstance(loaded, ModuleType) else loaded


def _distribution(entry: EntryPoint) -> str:
    return f"distribution '{entry.dist.name}'" if entry.dist else "a distribution without a name"


def _module(path: Path) -> ModuleType:
    """The file as a module, read once; its own name keeps it apart from every installed module."""
    path = path.expanduser().resolve()
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    spec = spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[name] = module  # before it runs: dataclasses look their own module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
