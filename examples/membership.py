"""Was this row in the data? Membership inference against a published primary, with and without noise.

Run it: python examples/membership.py    (needs pip install 'apfl[privacy]')

Two attackers, each with a row and its label. One has the published primary alone: it fits a row better if the row was
in the sums, so a threshold on the squared error tells, and he has the best one. The other one also has the sums, and
every row behind them but this one: he subtracts those and compares what is left with the row. Noise is made for him.
Beside them stands what (epsilon, delta) allows: the rate of true positives less that of false ones, at most.
"""

import numpy as np
import torch
from sklearn.datasets import load_digits

from apfl.errors import InputError
from apfl.maths.centred import centred, within
from apfl.maths.landmarks import draw_points, landmark_map, no_spread
from apfl.maths.noise import SENSITIVITY, IntegerRows, gamma_for, shrunk
from apfl.maths.privacy import most_advantage, noise_multiplier
from apfl.maths.ridge import one_hot, solve

WIDTH, MEMBERS, DELTA, GAMMA = 512, 300, 1e-5, 1e-3
ENCODING = IntegerRows(WIDTH, 10, 32)


def digits(seed=0):
    """Activated rows and labels: members first, then as many others."""
    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(seed).permutation(len(pixels))[: 2 * MEMBERS]
    spread = no_spread(64)
    mapped = centred(landmark_map(draw_points(WIDTH, 0, spread)), draw_points(1000, 1, spread))
    return within(mapped(torch.from_numpy(np.sqrt(pixels[order])))), torch.from_numpy(labels[order])


def sigma_of(epsilon):
    """The noise of an entry of the sums."""
    return SENSITIVITY * noise_multiplier(epsilon, DELTA)


def published(phi, labels, epsilon, rng):
    """The primary of these rows."""
    vector, _ = ENCODING.encode(phi, labels)
    if epsilon is None:
        return solve(ENCODING.decode(vector), GAMMA)
    sigma = sigma_of(epsilon)
    noisy = ENCODING.decode(vector + ENCODING.noise(sigma, rng))
    return solve(shrunk(noisy, sigma), gamma_for(sigma, WIDTH))


def advantage(members, others):
    """Of the best threshold: the largest difference of the two rates of "was in the data"."""
    at = np.sort(np.concatenate([members, others]))
    rates = [1 - np.searchsorted(np.sort(each), at, side="left") / len(each) for each in (members, others)]
    return float(np.max(rates[0] - rates[1]))


def with_the_primary(phi, labels, epsilon, rng, draws=3):
    """The mean advantage over draws of the noise."""
    found = []
    for _ in range(draws):
        weights = published(phi[:MEMBERS], labels[:MEMBERS], epsilon, rng)
        scores = -(one_hot(labels, 10) - phi @ weights).square().sum(1).numpy()
        found.append(advantage(scores[:MEMBERS], scores[MEMBERS:]))
    return float(np.mean(found))


def with_all_other_rows(phi, labels, epsilon, rng, draws=400):
    """The advantage over draws of the noise, half of them with the row: by the likelihood of what is left."""
    if epsilon is None:
        return 1.0  # what is left is the row's own sums, or nothing
    narrow = IntegerRows(phi.shape[1], 10, 32)
    own, _ = narrow.encode(phi[:1], labels[:1])
    sigma = sigma_of(epsilon)
    weights = torch.cat([torch.full((p.size,), narrow.sizes(sigma)[p.name]) for p in narrow.layout.parts]).double()
    direction = own / weights.square()
    left = np.array([float(direction @ narrow.noise(sigma, rng).double()) for _ in range(draws)])
    left[: draws // 2] += float(direction @ own.double())
    return advantage(left[: draws // 2], left[draws // 2 :])


def main():
    """Less and less noise."""
    torch.set_num_threads(1)
    (phi, labels), rng = digits(), np.random.default_rng(0)
    by_chance = advantage(rng.random(MEMBERS), rng.random(MEMBERS))
    print(f"{MEMBERS} members and as many others; by chance alone an advantage of {by_chance:.2f} or so")
    try:
        noise_multiplier(1.0, DELTA)
    except InputError as error:
        print(f"no noise: {error}")
        return
    print("epsilon   with the primary   with all other rows, too   allowed")
    for epsilon in (1.0, 2.0, 4.0, 8.0, None):
        seen = with_the_primary(phi, labels, epsilon, rng)
        known = with_all_other_rows(phi[:, :64], labels, epsilon, rng)
        allowed = 1.0 if epsilon is None else most_advantage(epsilon, DELTA)
        print(f"{epsilon or 'no noise':<9} {seen:<18.2f} {known:<26.2f} {allowed:.2f}")


if __name__ == "__main__":
    main()
