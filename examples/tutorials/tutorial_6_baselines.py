"""
Comparing with baselines
========================

A method is as good as the opponents it was compared with. This page compares ``apfl`` with gradient methods on one
federation, tunes them on training rows, and reads the result as it should be read.
"""

# %%
# The opponents
# -------------
# ``apfl.method_names()`` lists what there is. Gradient methods train a linear head on the same features.

import tempfile

import matplotlib.pyplot as plt

import apfl

print(*apfl.method_names())

# %%
# A fair run
# ----------
# All methods see the same clients, the same rows and the same features. ``tune=True`` holds out a fifth of each
# client's training rows, tries the grid of each method that has one, and keeps the best point. Test rows are not used.
# We limit the rounds to keep this page short; for a table that you publish, leave the default.

names = ["local_ridge", "afl", "fedavg", "fedavg_ft", "ditto", "apfl"]
rounds = {name: {"n_rounds": 10} for name in ("fedavg", "fedavg_ft", "ditto")}
folder = tempfile.mkdtemp()
results = apfl.run(
    "digits", names, clients=8, alpha=0.1, seeds=2, settings=rounds, tune=True, save_models=False, out=f"{folder}/run"
)
results

# %%
# The table
# ---------
# The first table has means and spreads over seeds. The second has differences, paired by client and seed, with 95 %
# intervals that account for other seeds *and* other clients, and p-values adjusted for the number of methods. An
# interval that contains zero is no win.

print(results.table())

# %%
# What it costs
# -------------
# A method of one exchange sends more in it. Whether that is much depends on how many rounds the others need.

figure = results.plot("bytes")
plt.show()

# %%
# Five traps
# ----------
# 1. *The best round.* Choosing the round by test accuracy flatters whoever wobbles most. apfl reports the last round.
# 2. *Untuned opponents.* Tune on training rows, with grids of the same size. The record keeps the grid.
# 3. *One seed.* Clients differ between draws; the interval says by how much.
# 4. *A global model on a global test set* beside personal models on their clients' own rows: two different questions.
# 5. *Other features.* Compare methods on the same backbone.
#
# For more than a few cells write a plan, which runs in parallel and resumes: ``apfl bench own --data features.npz``;
# see :doc:`/experiments`. What came out on public features is in :doc:`/results/baselines`.
