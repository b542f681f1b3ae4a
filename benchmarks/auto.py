"""The automatic choice against the best choice on the test rows, and against the paper's family.

    python benchmarks/auto.py --data ../shared/data --out runs/auto [--device cuda] [--settings cifar100 pacs]

Twelve settings, three seeds, and digits beside them. For each: `apfl` as it is (which never sees a test row),
`apfl_paper`, and the *oracle*: the best single (gamma, beta, lambda, tau) on a grid, chosen on the test rows by the
mean over seeds, with everything else as in `apfl`. Writes OUT/records.jsonl as it goes and prints a table.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import settings
import torch

from apfl.experiment import Protocol, federate, keep_record, run
from apfl.federation import Dataset, Federation
from apfl.gcv import feature_energy
from apfl.leaveout import LeftOut, hat_basis, leverage_sketch
from apfl.methods import load_method
from apfl.methods._primary import mapped_and_summed, shared_normaliser, stream_maps
from apfl.personal import solve_primary, width_for
from apfl.ridge import one_hot
from apfl.tables import local_prior

GAMMAS = [10.0**p for p in (-3, -2, -1.5, -1, -0.5, 0, 0.5)]  # over the feature energy, around where GCV lies
BETAS = [10.0 ** (p / 2) for p in range(-6, 5)]
BALANCES = [0.0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0, 1.2, 1.4]
TAUS = [0.0, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.12, 0.18, 0.25]


def oracle_table(federation: Federation, seed: int) -> torch.Tensor:
    """Mean client accuracy on *test* rows over (gamma, beta, balance, tau); every stream as `apfl` fits it."""
    method = load_method("apfl")
    clients, tests, c = federation.train, federation.test, federation.n_classes
    features = clients[0].features
    width = width_for(sum(map(len, clients)))
    normalise = shared_normaliser(method.normalise, clients)
    activations = (method.activation_primary, method.activation_refinement)
    maps = stream_maps(features, (width, width), activations, seed, method.intercept)
    phis, summed = mapped_and_summed(clients, c, normalise, maps[0])
    unit = feature_energy(summed)
    table = torch.zeros(len(GAMMAS), len(BETAS), len(BALANCES), len(TAUS), dtype=torch.float64, device=features.device)
    measured = [k for k in range(len(clients)) if len(tests[k])]
    balances = torch.tensor(BALANCES, dtype=torch.float32, device=features.device)[:, None, None]
    primaries = [solve_primary(summed, unit * gamma) for gamma in GAMMAS]
    sketches = [leverage_sketch(primary.factor, method.sketch, seed) for primary in primaries]
    for k in measured:
        z, z_test = normalise(clients[k].features), normalise(tests[k].features)
        psi, phi_test = maps[1](z).double(), maps[0](z_test).double()
        hat = hat_basis(psi)
        across = (maps[1](z_test).double() @ psi.T) @ hat.basis  # Psi_test P = across diag(1 / (s + beta)) U'T
        targets = one_hot(clients[k].labels, c)
        prior = local_prior(targets.sum(0), summed.class_counts, method.smoothing)
        for g, (primary, sketch) in enumerate(zip(primaries, sketches, strict=True)):
            phi = phis[k].double()
            target = LeftOut(
                hat, phi @ sketch, targets - phi @ primary.weights, method.refinement, sketched=True
            ).target
            inner = hat.basis.T @ target
            bases = [(phi_test @ primary.weights + tau * prior).float() for tau in TAUS]
            for b, beta in enumerate(BETAS):
                refined = balances * ((across / (hat.values + unit * beta)) @ inner).float()
                for t, base in enumerate(bases):
                    hits = (base + refined).argmax(2) == tests[k].labels
                    table[g, b, :, t] += hits.double().mean(1) / len(measured)
    return table.cpu()


def measure(
    data: str, dataset: Dataset, protocol: Protocol, seeds: list[int], device: str, out: Path
) -> dict[str, object]:
    accuracy: dict[str, list[float]] = {"apfl": [], "apfl_paper": []}
    tables, start = [], time.perf_counter()
    for seed in seeds:
        federation = federate(dataset, protocol, seed).to(device)
        for name in accuracy:
            record, _ = run(name, load_method(name), federation, dataset, protocol, seed)
            keep_record(settings.with_commit(record), out / "records.jsonl")
            accuracy[name].append(record.accuracy_client_mean)
        tables.append(oracle_table(federation, seed))
    mean = torch.stack(tables).mean(0)
    where = np.unravel_index(int(mean.argmax()), mean.shape)
    best = [axis[i] for axis, i in zip((GAMMAS, BETAS, BALANCES, TAUS), where, strict=True)]
    row = {
        "setting": settings.name_of(data, protocol), "protocol": asdict(protocol), "apfl": accuracy["apfl"],
        "apfl_paper": accuracy["apfl_paper"], "oracle": float(mean.max()), "oracle_setting": best,
        "seconds": time.perf_counter() - start,
    }  # fmt: skip
    with (out / "oracle.jsonl").open("a") as stream:
        stream.write(json.dumps(row) + "\n")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=settings.DATA)
    parser.add_argument("--out", type=Path, default=Path("runs/auto"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--settings", nargs="+", default=list(settings.FILES), help="beginnings of their names")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    loaded: dict[str, Dataset] = {}
    print("| setting | apfl_paper | apfl (automatic) | oracle on test | apfl - oracle | seconds |")
    print("| --- | --- | --- | --- | --- | --- |")
    for data, protocol in settings.chosen(arguments.settings):
        if data not in loaded:
            loaded[data] = settings.load(arguments.data, data)
        row = measure(data, loaded[data], protocol, arguments.seeds, arguments.device, arguments.out)
        ours, paper = (100 * np.mean(row[name]) for name in ("apfl", "apfl_paper"))  # type: ignore[arg-type]
        spread = 100 * np.std(row["apfl"], ddof=1) if len(arguments.seeds) > 1 else 0.0  # type: ignore[arg-type]
        oracle = 100 * float(row["oracle"])  # type: ignore[arg-type]
        print(
            f"| {row['setting']} | {paper:.1f} | {ours:.1f} ± {spread:.1f} | {oracle:.1f} | {ours - oracle:+.2f} "
            f"| {row['seconds']:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
