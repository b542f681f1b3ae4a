"""Find a thing by name: a file of a package, an entry point of an installed distribution, or a path ``./mine.py:Mine``.

Methods, partitions, sources and backbones are all found this way.
"""

from __future__ import annotations

import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from apfl.errors import InputError, unknown

__all__ = ["Registry", "file_of", "is_path"]

_PATH = re.compile(r"(?P<file>.+\.py)(:(?P<attribute>\w+))?")
_SHA256: dict[str, str] = {}  # of the files that were loaded, by the name of the module
_ADOPTED: dict[tuple[str, str], Any] = {}  # by kind and name, things that were given as objects
_FILES: dict[int, tuple[Any, dict[str, str]]] = {}  # by its id, each thing that was loaded by path, and `file_of` it


def is_path(name: str) -> bool:
    """Whether a name is a Python file, with or without the name of something in it.

    >>> is_path("./mine.py:Mine"), is_path("mine.py"), is_path("apfl")
    (True, True, False)
    """
    return _PATH.fullmatch(name) is not None


def file_of(thing: Any) -> dict[str, str]:
    """Of a thing that was loaded by path: its absolute ``path`` and the ``sha256`` of the file; else nothing."""
    return _FILES.get(id(thing), (None, {}))[1]


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
        return sorted({*self.builtin(), *(entry.name for entry in _entries(self.group))})

    def load(self, name: str) -> Any:
        """The thing of this name, or at this path."""
        if is_path(name):
            return self._from_path(name)
        if (self.kind, name) in _ADOPTED:
            return _ADOPTED[self.kind, name]
        builtin = name in self.builtin()
        entries = [entry for entry in _entries(self.group) if entry.name == name]
        if len(entries) + builtin > 1:
            homes = ["apfl itself"] * builtin + [_distribution(entry) for entry in entries]
            raise InputError(f"{self.kind} '{name}' is in {' and in '.join(homes)}; uninstall or rename all but one")
        if entries:
            return self._from_entry(entries[0])
        if not builtin:
            raise unknown(self.kind, name, self.names())
        return self.pick(import_module(f"{self.package}.{name}"))

    def adopt(self, thing: Any) -> str:
        """The name of a thing that is given as an object. If it is not installed, `load` finds it from now on.

        As if it were given by path, `file_of` it is the file it was defined in, or the hash of its text.
        """
        module, name = getattr(thing, "__module__", ""), getattr(thing, "__name__", type(thing).__name__)
        for builtin in self.builtin():
            if module == f"{self.package}.{builtin}":
                return builtin
        for entry in _entries(self.group):
            if entry.value == f"{module}:{name}":
                return entry.name
        if name in self.names():
            raise InputError(f"{self.kind} {thing!r} given; '{name}' is the name of an installed one: rename yours")
        _ADOPTED[self.kind, name] = thing
        _FILES.setdefault(id(thing), (thing, _defined_in(thing, name)))
        return name

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

    def by_name(self, names: Iterable[str]) -> dict[str, str]:
        """Each name or path under what records call it; two that records cannot tell apart are an error."""
        named: dict[str, str] = {}
        for name in names:
            if named.setdefault(self.name_of(name), name) != name:
                raise InputError(f"{named[self.name_of(name)]} and {name} given; two {self.kind}s need two names")
        return named

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
            thing = self._thing(getattr(module, match["attribute"]) if match["attribute"] else module)
        except Exception as error:  # whatever somebody else's file raises while it is imported
            raise InputError(
                f"{self.kind} {name} cannot be loaded ({type(error).__name__}: {error}); "
                f"give a file and a name in it: ./mine.py:Mine"
            ) from error
        attribute = f":{match['attribute']}" if match["attribute"] else ""
        own = {"path": f"{module.__file__}{attribute}", "sha256": _SHA256[module.__name__]}
        _FILES[id(thing)] = thing, own
        return thing

    def _thing(self, loaded: Any) -> Any:
        return self.pick(loaded) if isinstance(loaded, ModuleType) else loaded


def _entries(group: str) -> tuple[EntryPoint, ...]:
    """What installed distributions have of a group: looked up once for a search path, because it reads many files."""
    return _looked_up(group, tuple(sys.path), entry_points)


@lru_cache
def _looked_up(group: str, path: tuple[str, ...], look: Callable[..., Iterable[EntryPoint]]) -> tuple[EntryPoint, ...]:
    return tuple(look(group=group))


def _defined_in(thing: Any, name: str) -> dict[str, str]:
    """`file_of` a thing that is given as an object; nothing if Python does not have its text."""
    try:
        file, text = inspect.getsourcefile(thing), inspect.getsource(thing).encode()
    except (OSError, TypeError):
        return {}
    if file is None:
        return {}
    whole = Path(file).read_bytes() if Path(file).is_file() else text
    return {"path": f"{Path(file).absolute()}:{name}", "sha256": hashlib.sha256(whole).hexdigest()}


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
    module, text = module_from_spec(spec), path.read_bytes()
    sys.modules[name] = module  # before it runs: dataclasses look their own module up
    try:
        # Not by the loader, which may take a compiled file of an earlier text: what runs is what is hashed.
        exec(compile(text, path, "exec"), vars(module))
    except BaseException:
        del sys.modules[name]
        raise
    _SHA256[name] = hashlib.sha256(text).hexdigest()
    return module
