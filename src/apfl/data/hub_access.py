"""The Hugging Face Hub, and life without it: a local copy first, then the Hub, then its cache, then one clear line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from apfl.errors import InputError, optional

__all__ = ["Repository", "cache_folder", "file_in", "locate", "offline", "unavailable"]


@dataclass(frozen=True)
class Repository:
    """Where a model or dataset is to be loaded from."""

    source: str  # a folder, or a name on the Hub
    revision: str | None  # the commit; unknown for a folder
    reachable: bool  # whether the Hub answered, or need not be asked


def cache_folder() -> Path:
    """Where apfl keeps what it computed or was given: ``$APFL_CACHE``, else ``~/.cache/apfl``."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "apfl"
    return Path(os.environ.get("APFL_CACHE") or default)


def local_copy(name: str, kind: str) -> Path:
    """The folder where a copy of ``owner/name`` made by hand is looked for; ``kind`` is "model" or "dataset"."""
    return cache_folder() / f"{kind}s" / name.replace("/", "--")


def locate(name: str, kind: str, revision: str | None) -> Repository:
    """Ask the Hub once, with a time limit, for the commit of ``name``.

    The libraries themselves retry for minutes when there is no network; this finds out in seconds.
    """
    folder = local_copy(name, kind)
    if folder.is_dir() and revision is None:
        return Repository(str(folder), None, reachable=True)
    hub = optional("huggingface_hub", "hub")
    errors = optional("huggingface_hub.errors", "hub")
    try:
        info = hub.HfApi().repo_info(name, repo_type=kind, revision=revision, timeout=10)
    except errors.RevisionNotFoundError as error:
        raise InputError(f"{kind} '{name}' has no revision '{revision}' on the Hub; give a branch or commit") from error
    except errors.GatedRepoError as error:
        raise InputError(f"{kind} '{name}' needs its terms accepted on the Hub, then `hf auth login`") from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise InputError(
            f"no {kind} '{name}' on the Hub; give owner/name as its page shows it, or `hf auth login` if it is private"
        ) from error
    except Exception:  # no network shows as errors of three libraries: httpx, the operating system, the Hub's own
        return Repository(name, revision, reachable=False)
    return Repository(name, info.sha, reachable=True)


def file_in(repository: Repository, name: str) -> Path | None:
    """One file of a model or of its folder; none if it has no such file."""
    if (folder := Path(repository.source)).is_dir():
        return folder / name if (folder / name).is_file() else None
    hub, errors = optional("huggingface_hub", "hub"), optional("huggingface_hub.errors", "hub")
    try:
        with offline(repository):
            options = {"revision": repository.revision, "local_files_only": not repository.reachable}
            return Path(hub.hf_hub_download(repository.source, name, **options))
    except errors.EntryNotFoundError:  # on the Hub, or in its cache
        return None


@contextmanager
def offline(repository: Repository) -> Iterator[None]:
    """Let the libraries use their caches alone while the Hub cannot be reached, instead of retrying."""
    if repository.reachable:
        yield
        return
    modules = [optional("huggingface_hub.constants", "hub"), optional("datasets.config", "hub")]
    former = [module.HF_HUB_OFFLINE for module in modules]
    try:
        for module in modules:
            module.HF_HUB_OFFLINE = True
        yield
    finally:
        for module, value in zip(modules, former, strict=True):
            module.HF_HUB_OFFLINE = value


def unavailable(name: str, kind: str) -> InputError:
    """The Hub cannot be reached and nothing is cached: what to download, where, and where to put it."""
    folder = local_copy(name, kind)
    what = "" if kind == "model" else f" --repo-type {kind}"
    return InputError(
        f"{kind} '{name}' is not on this machine and the Hub cannot be reached; where there is a network run "
        f"`hf download {name}{what} --local-dir {folder}` and put that folder at {folder} here"
    )
