"""Rows of data from an upload, and what masks do about it.

Run it: python examples/attacks.py    (with masks: pip install 'apfl[flower]')
        python examples/attacks.py attacks.png    draws the rows, too: docs/attacks.md

A site sends Phi'Phi. With fewer rows than columns it tells the span of the site's activated rows, and phi(z) lies in it
if z is one of the site's rows. That can be solved for z: Levenberg and Marquardt's steps from random starts. A row that
is found is subtracted, and the search goes on. The labels follow from Phi'Y. The attacker knows what the server knows:
the map, the number of rows, and that pixels are between 0 and 1.
"""

import sys

import numpy as np
import torch
from sklearn.datasets import load_digits

from apfl import random_map
from apfl.errors import InputError
from apfl.federate.secure import masked_sum, signed
from apfl.federate.secure.masks import add_packed, packed_bytes, word

STEP, BITS = 2.0**-20, 40  # statistics are sums of integers
STARTS, STEPS, FOUND = 24, 50, 1e-8  # of one batch; the squared share of phi(z) outside the span
CLOSE = 1 / 32  # half a grey level: rounded, the row is exact


class Attack:
    """Row recovery from Phi'Phi (d, d) of ``n`` rows under a map with hardswish, which everyone knows."""

    def __init__(self, phi, upload, n, seed=0):
        self.phi, self.upload, self.n = phi, upload.clone(), n
        self.rng = torch.Generator().manual_seed(seed)
        self.rows = torch.zeros(0, phi.n_in, dtype=torch.float64)

    def run(self, batches=1000):
        """Rows found, until a batch of starts finds none."""
        for _ in range(batches):
            fresh = self.batch() if len(self.rows) < self.n else self.rows[:0]
            if not len(fresh):
                break
            self.rows = torch.cat([self.rows, fresh])
            told = self.phi(fresh)
            self.upload -= told.T @ told
        return self.rows

    def batch(self):
        left = self.n - len(self.rows)
        self.span = torch.linalg.eigh(self.upload).eigenvectors[:, -left:]
        z = torch.rand(STARTS, self.phi.n_in, generator=self.rng, dtype=torch.float64) / 2
        outside, damping = self.outside(z), torch.full((STARTS,), 0.1, dtype=torch.float64)
        for _ in range(STEPS):
            step = (z - self.step(z, outside, damping)).clamp(0, 1)
            after = self.outside(step)
            better = after.square().sum(1) < outside.square().sum(1)
            z, outside = (torch.where(better[:, None], new, old) for new, old in ((step, z), (after, outside)))
            damping = torch.where(better, 0.4 * damping, 3 * damping).clamp(1e-9, 1e3)
        self.ended = z
        return self.distinct(z[outside.square().sum(1) < FOUND])

    def outside(self, z):
        """The part of phi(z), at length 1, that is not in the span."""
        unit = torch.nn.functional.normalize(self.phi(z))
        return unit - unit @ self.span @ self.span.T

    def step(self, z, outside, damping):
        told = self.phi(z)
        jacobian = self.jacobian(z) / told.norm(dim=1)[:, None, None]
        unit = torch.nn.functional.normalize(told)[:, :, None]
        jacobian -= unit @ (unit.transpose(1, 2) @ jacobian)
        jacobian -= self.span @ (self.span.T @ jacobian)
        normal = jacobian.transpose(1, 2) @ jacobian
        size = damping * normal.diagonal(dim1=1, dim2=2).mean(1)
        normal += size[:, None, None] * torch.eye(len(z[0]), dtype=torch.float64)
        # With the span of everything nothing is outside, and every z will do.
        return torch.linalg.lstsq(normal, jacobian.transpose(1, 2) @ outside[:, :, None]).solution[:, :, 0]

    def jacobian(self, z):
        """Of phi, (starts, d, l)."""
        matrix = self.phi.matrix.double()
        slopes = torch.where((z @ matrix).abs() < 3, (2 * (z @ matrix) + 3) / 6, (z @ matrix > 0).double())
        return slopes[:, :, None] * matrix.T

    @staticmethod
    def distinct(rows):
        kept = []
        for row in rows:
            if all((row - other).abs().max() > CLOSE for other in kept):
                kept.append(row)
        return torch.stack(kept) if kept else rows[:0]


class LandmarkAttack(Attack):
    """The same under a landmark map, which tells the direction of a row: rows are those of length one."""

    def jacobian(self, z):
        """Of L^-1 k(V, z / |z|); the kernel's slope by the cosine is (pi - angle) / pi."""
        length, points = z.norm(dim=1)[:, None], self.phi.landmarks
        unit = z / length
        slopes = 1 - torch.arccos((unit @ points.T).clamp(-1, 1)) / torch.pi
        inner = slopes[:, :, None] * points
        inner -= (inner @ unit[:, :, None]) * unit[:, None]
        return torch.linalg.solve_triangular(self.phi._factor, inner / length[:, None], upper=False)

    def batch(self):
        """Rows of length one."""
        return self.distinct(torch.nn.functional.normalize(super().batch()))


def recovered(found, rows):
    """How many of the true rows were found."""
    if not len(found):
        return 0
    return int(((rows[:, None] - found).abs().amax(2).amin(1) < CLOSE).sum())


def integers(phi, rows):
    """Phi'Phi as the integers that travel."""
    told = phi(rows)
    return torch.round(told.T @ told / STEP).long()


def masked_upload(uploads):
    """What the server gets of the first site, and the sum, in a masked sum of all sites."""
    heard = {}
    vectors = {f"site-{i}": upload.numpy().reshape(-1) for i, upload in enumerate(uploads)}
    done = masked_sum(vectors, BITS, overhear=lambda phase, name, answer: heard.update({(phase, name): answer}))
    payload, size = heard["mask", "site-0"], len(vectors["site-0"])
    masked = np.zeros(size, word(BITS))
    add_packed(masked, payload[-packed_bytes(size, BITS) :], BITS)
    square = uploads[0].shape
    return (torch.from_numpy(signed(each, BITS)).reshape(square) for each in (masked, done.total))


def sites(n_sites, n_rows):
    """Digits, dealt out."""
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(pixels))[: n_sites * n_rows]
    split = order.reshape(n_sites, n_rows)
    return [(torch.from_numpy(pixels[each] / 16), torch.from_numpy(labels[each])) for each in split]


def labels_right(phi, found, rows, labels):
    """How many labels of the true rows follow from Phi'Y once all rows are known."""
    phi_y = phi(rows).T @ torch.nn.functional.one_hot(labels, 10).double()
    told = torch.linalg.lstsq(phi(found).T, phi_y).solution.argmax(1)
    nearest = (rows[:, None] - found).abs().amax(2).argmin(1)
    return int((told[nearest] == labels).sum())


def symmetric(matrix):
    """Phi'Phi from its integers; a masked one is not even symmetric."""
    return (matrix + matrix.T).double() * STEP / 2


def nearest(found, rows):
    """Of what an attack ended with, the row that is nearest to each true one."""
    return found[(rows[:, None] - found).abs().amax(2).argmin(1)]


def picture(path, *lines):
    """Ten digits in each line, black on white, six pixels for one."""
    from matplotlib.image import imsave

    tiles = [[np.pad(1 - row.reshape(8, 8).numpy(), 1, constant_values=1) for row in line[:10]] for line in lines]
    sheet = np.vstack([np.pad(np.hstack(line), ((0, 1), (0, 0)), constant_values=1) for line in tiles])
    imsave(path, np.kron(sheet, np.ones((6, 6))), cmap="gray", vmin=0, vmax=1)


def main():
    """Four uploads, from dangerous to safe and back."""
    torch.set_num_threads(1)
    everyone, d = sites(5, 40), 128
    phi = random_map(64, d, activation="hardswish", seed=0)
    rows, labels = everyone[0]
    uploads = [integers(phi, each) for each, _ in everyone]

    found = Attack(phi, symmetric(uploads[0]), len(rows)).run()
    print(f"plain upload, {len(rows)} rows in {d} columns: {recovered(found, rows)} rows recovered", end="")
    print(f", {labels_right(phi, found, rows, labels)} labels" if len(found) == len(rows) else "")
    try:
        masked, total = masked_upload(uploads)
    except InputError as error:
        print(f"no masks: {error}")
        return
    blind = Attack(phi, symmetric(masked), len(rows))
    print(f"the same upload, masked: {recovered(blind.run(), rows)} rows recovered")
    for path in (each for each in sys.argv[1:] if each.endswith(".png")):
        picture(path, rows, nearest(found, rows), nearest(blind.ended, rows))

    # The sum is what the server learns, and a sum is not always safe.
    assert (total == sum(uploads)).all()
    all_rows = torch.cat([each for each, _ in everyone])
    found = Attack(phi, symmetric(total), min(len(all_rows), d)).run(batches=1)
    print(f"the sum of 5 sites, {len(all_rows)} rows in {d} columns: {recovered(found, all_rows)} rows recovered")
    wide = random_map(64, 4 * d, activation="hardswish", seed=0)
    found = Attack(wide, symmetric(integers(wide, all_rows)), len(all_rows)).run(batches=1)
    print(
        f"a sum that is too wide, {len(all_rows)} rows in {4 * d} columns: {recovered(found, all_rows)} rows recovered "
    )


if __name__ == "__main__":
    main()
