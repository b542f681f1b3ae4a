"""
Your own embeddings
===================

apfl works on features: a row of numbers for each sample, from a frozen network that all clients share. This page goes
from embeddings and labels in arrays to models, and shows what to do with rows that belong together.
"""

# %%
# From samples to rows
# --------------------
# Any network will do that all clients have. Take the output of its last layer but one. Here a small random network
# stands in for it, so that the page needs no download; in your code it is a call of your encoder.

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
from sklearn.datasets import load_digits

import apfl

images, labels = load_digits(return_X_y=True)
torch.manual_seed(0)
encoder = torch.nn.Sequential(
    torch.nn.Unflatten(1, (1, 8, 8)),
    torch.nn.Conv2d(1, 32, 3),
    torch.nn.ReLU(),
    torch.nn.MaxPool2d(3),
    torch.nn.Flatten(),
)
with torch.no_grad():
    embeddings = encoder(torch.from_numpy(images).float() / 16).numpy()
embeddings.shape

# %%
# The real clients, and the rows that belong together
# ---------------------------------------------------
# Columns say what else is known about each row: here the site that holds it and the writer of the digit. Rows of one
# writer must not be in training *and* test, or the accuracy is too high. (Sites and writers are invented here.)

rng = np.random.default_rng(0)
site = np.array(["north", "south", "west"])[np.digitize(labels + rng.normal(0, 2, len(labels)), [3, 7])]
writer = rng.integers(0, 150, len(labels))

data = apfl.load_data(embeddings, labels, columns={"site": site, "writer": writer}, name="my embeddings")
narrow = {"apfl": {"d_primary": 512, "d_refinement": 512}}  # to keep this page fast; by default apfl chooses
named = {"client_column": "site", "group_column": "writer"}
results = apfl.run(data, ["local_ridge", "afl", "apfl"], **named, seeds=1, settings=narrow)
results

# %%
# Who gained what
# ---------------
# The first part is the gain of each client over the shared stream alone, the second over going alone.

figure = results.plot("gains")
plt.show()

# %%
# Models to deploy
# ----------------
# ``test_fraction=0`` trains on all rows. It needs a folder, because there is nothing else to return. Choose the seed
# before you look at accuracies.

folder = Path(tempfile.mkdtemp()) / "deploy"
deployed = apfl.run(data, "apfl", **named, seeds=1, settings=narrow, test_fraction=0, out=folder)
deployed.model("apfl", client="west").predict(embeddings[:5])

# %%
sorted(path.name for path in folder.rglob("*.safetensors"))

# %%
# The same from files
# -------------------
# An ``.npz`` with ``features``, ``labels`` and the columns works on the command line:
# ``apfl run --data mine.npz --client-column site --group-column writer``.

np.savez(folder.parent / "mine.npz", features=embeddings, labels=labels, site=site, writer=writer)
apfl.load_data(folder.parent / "mine.npz")

# %%
# Images and text
# ---------------
# For folders of images apfl has backbones of its own (``--backbone``), and a cache that resumes; see
# :doc:`/features`. For text, use the sentence encoder that you trust and store its rows as above. Use the same network,
# the same version of it and the same pooling at each site: sums of different features mean nothing.
