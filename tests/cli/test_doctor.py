"""``apfl doctor`` says what is true of this machine."""

from __future__ import annotations

import re

import pytest
import torch
from packaging.requirements import Requirement

import apfl
from apfl.cli import doctor
from apfl.maths import machine, memory
from tests.commands import here


def shown(capsys, *options: object) -> list[tuple[str, str]]:
    assert here("doctor", *options) == 0
    return [(line[:13].strip(), line[14:]) for line in capsys.readouterr().out.splitlines()]


def test_it_names_versions_threads_and_devices(capsys):
    said = shown(capsys)
    assert dict(said)["apfl"].startswith(f"{apfl.__version__} in ")
    assert f"torch {torch.__version__}" in dict(said)["versions"]
    assert dict(said)["threads"].startswith(f"{torch.get_num_threads()} of torch, {machine.n_cores()} cores")
    assert any(words.startswith("openblas") or words.startswith("mkl") for name, words in said if name == "blas")
    extras = [re.match(r"(\w+): ", words)[1] for name, words in said if name == "extra"]
    assert {"flower", "hub", "tables"} <= set(extras)
    assert not {"all", "dev", "docs"} & set(extras)


def test_a_missing_or_unfit_package_comes_with_the_line_that_installs_it(monkeypatch):
    extra = '; extra == "flower"'
    wanted = ["numpy>=2", f"flwr<1.42,>=1.41{extra}", f"no-such-package{extra}", f"numpy<1{extra}"]
    monkeypatch.setattr(doctor, "requires", lambda name: wanted)
    monkeypatch.setattr(doctor, "version", versions := _versions({"flwr": "1.41.0", "numpy": "2.4.6"}))
    said = doctor._extra("flower")
    assert said == "flower: no no-such-package, numpy 2.4.6 is not <1; pip install 'apfl[flower]'"
    assert doctor._extra("tables") == "tables: installed"  # the requirements of others do not count
    assert versions("flwr") == "1.41.0"
    assert doctor._fault(Requirement("flwr<1.41")) == "flwr 1.41.0 is not <1.41"


def _versions(of: dict[str, str]):
    def version(name: str) -> str:
        if name not in of:
            raise doctor.PackageNotFoundError(name)
        return of[name]

    return version


@pytest.mark.parametrize("free", [10**8, 10**9, 10**10])
def test_the_width_fits_and_the_next_does_not(monkeypatch, free):
    cpu = torch.device("cpu")
    monkeypatch.setattr(machine, "available", lambda device: free)
    width = machine.widest(5000, 2, cpu)
    assert width is not None
    assert memory.of_run(width, 5000, 2) <= free < memory.of_run(2 * width, 5000, 2)
    monkeypatch.setattr(doctor, "available", lambda device: free)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert f"d_primary up to {width} fits" in doctor._memory(5000)


def test_a_system_that_does_not_say_what_is_free(monkeypatch):
    monkeypatch.setattr(doctor, "available", lambda device: None)
    assert "does not say" in doctor._memory(10)
    monkeypatch.setattr(machine, "available", lambda device: None)
    assert machine.widest(10, 1, torch.device("cpu")) is None


def test_a_system_without_federations_is_told(monkeypatch):
    monkeypatch.setattr(doctor, "knows_users", lambda: False)
    assert "cannot ask the kernel" in doctor._system()
    monkeypatch.setattr(doctor.os, "name", "nt")
    assert "`apfl federate` needs Linux or macOS" in doctor._system()
