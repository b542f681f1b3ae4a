"""Three hospitals, one of which leaves again.

Run it: python examples/hospitals.py
"""

import numpy as np
from sklearn.datasets import load_digits

from apfl import APFLClassifier

# Digits stand in for images; each hospital sees mostly some of the classes.
X, y = load_digits(return_X_y=True)
rng = np.random.default_rng(0)
usual = np.array(["north", "south", "west"])[np.digitize(y, [3, 7])]
hospital = np.where(rng.random(len(y)) < 0.9, usual, rng.choice(["north", "south", "west"], len(y)))
train = rng.random(len(y)) < 0.5

# The landmarks of a federation follow its first rows; free ones follow nobody's, so that nothing of a hospital stays.
settings = {"d_primary": 256, "landmarks": "free", "normalise": "row"}
clf = APFLClassifier(**settings, unknown="shared")  # no warning about rows without a hospital
clf.fit(X[train], y[train], clients=hospital[train])

for name in clf.clients_:
    own = ~train & (hospital == name)
    personal = clf.score(X[own], y[own], clients=hospital[own])
    shared = clf.score(X[own], y[own])  # no hospital named
    print(f"{name:6} shared stream alone {shared:.3f}   with its own refinement {personal:.3f}")

# South leaves: what remains is the model that would exist had it never joined.
clf.remove_client("south")
never = train & (hospital != "south")
without = APFLClassifier(**settings).fit(X[never], y[never], clients=hospital[never])
print(f"south left; difference to never having joined: {np.abs(clf.primary_ - without.primary_).max():.0e}")
