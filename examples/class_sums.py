"""Rows of data from the sum of a class.

Run it: python examples/class_sums.py

A site's Phi'Y has one column for each class: the sum of phi(z) over the site's rows of the class. If these are few, the
sum has more numbers than the rows have together, and can be solved for them: Levenberg and Marquardt's steps from
random starts. The attacker knows what the server knows: the map, how many rows the class has, and that pixels are
between 0 and 1. So "at least two rows of each class" protects nobody.
"""

import torch
from sklearn.datasets import load_digits

from apfl import random_map

WIDTH, STARTS, STEPS = 1024, 1, 60
FOUND = 1e-12  # of the squared length of the sum
CLOSE = 1 / 32  # half a grey level: rounded, the row is exact


def class_rows(n, label, seed=0):
    """n digits of one class, pixels from 0 to 1."""
    pixels, labels = load_digits(return_X_y=True)
    of_class = torch.from_numpy(pixels[labels == label] / 16)
    return of_class[torch.randperm(len(of_class), generator=torch.Generator().manual_seed(seed))[:n]]


def recover(phi, total, n, seed=0, batches=6):
    """n rows whose activations add up to ``total`` (d,), as far as they are found, (n, l)."""
    rng = torch.Generator().manual_seed(seed)
    best, least = None, float("inf")
    for _ in range(batches):
        z = torch.rand(STARTS, n, phi.n_in, generator=rng, dtype=torch.float64)
        z, missed = descend(phi, total, z)
        if float(missed.min()) < least:
            best, least = z[missed.argmin()], float(missed.min())
        if least < FOUND * float(total.square().sum()):
            break
    return best


def descend(phi, total, z):
    """Steps from all starts at once; the rows, and the squared length of what their sum misses."""
    missing, damping = rest(phi, total, z), torch.full((len(z),), 0.1, dtype=torch.float64)
    for _ in range(STEPS):
        step = (z + change(phi, z, missing, damping)).clamp(0, 1)
        after = rest(phi, total, step)
        better = after.square().sum(1) < missing.square().sum(1)
        z = torch.where(better[:, None, None], step, z)
        missing = torch.where(better[:, None], after, missing)
        damping = torch.where(better, 0.3 * damping, 3 * damping).clamp(1e-9, 1e3)
        if float(missing.square().sum(1).min()) < FOUND * float(total.square().sum()):
            break
    return z, missing.square().sum(1)


def rest(phi, total, z):
    """What is missing of the sum, (starts, d)."""
    return total - phi(z.flatten(0, 1)).reshape(*z.shape[:2], -1).sum(1)


def change(phi, z, missing, damping):
    """(J'J + damping) dz = J' missing, with J the slopes of the sum in every pixel of every row."""
    matrix = phi.matrix.double()
    before = z @ matrix  # (starts, n, d)
    slopes = torch.where(before.abs() < 3, (2 * before + 3) / 6, (before > 0).double())  # of hardswish
    jacobian = torch.einsum("snd,ld->sdnl", slopes, matrix).flatten(2)
    normal = jacobian.transpose(1, 2) @ jacobian
    size = damping * normal.diagonal(dim1=1, dim2=2).mean(1)
    normal += size[:, None, None] * torch.eye(normal.shape[1], dtype=torch.float64)
    solved = torch.linalg.solve(normal, (jacobian.transpose(1, 2) @ missing[:, :, None])[:, :, 0])
    return solved.reshape(z.shape)


def recovered(found, rows):
    """How many of the true rows were found."""
    return int(((rows[:, None] - found).abs().amax(2).amin(1) < CLOSE).sum())


def main():
    """Classes of more and more rows."""
    torch.set_num_threads(1)
    phi = random_map(64, WIDTH, activation="hardswish", seed=0)
    for n in (2, 3, 5):
        rows = class_rows(n, label=3)
        found = recover(phi, phi(rows).sum(0), n)
        print(f"the sum of a class of {n} rows, {WIDTH} columns: {recovered(found, rows)} of {n} rows recovered")


if __name__ == "__main__":
    main()
