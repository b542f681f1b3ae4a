"""
Digits in five minutes
======================

Five clients hold images of handwritten digits. Each has mostly some of the ten digits. We want one good model for each
client, and no image may leave its client.
"""

# %%
# Run
# ---
# ``apfl.run`` deals the data out to clients, runs methods on them and measures each client's model on test rows of its
# own. ``local_ridge`` is each client alone, ``afl`` is one shared linear model, ``apfl`` has a shared and a private
# stream and chooses its settings itself.

import matplotlib.pyplot as plt

import apfl

results = apfl.run("digits", methods=["local_ridge", "afl", "apfl"], clients=5, alpha=0.1, seeds=2)
results

# %%
# The accuracy is the mean over clients. ``worst`` is the mean of the worst tenth of the clients. ``up`` and ``down``
# are the bytes of all clients together. ``alpha`` says how different the clients are: 0.1 is very, 100 is hardly.

# %%
# Look at every client
# --------------------
# A mean can hide a client. Each point is one client with one seed.

figure = results.plot("clients")
plt.show()

# %%
# Use a model
# -----------
# Each client has a model of its own. It takes arrays, DataFrames and tensors.

from sklearn.datasets import load_digits

images = load_digits().data[:8]
model = results.model("apfl", client=3)
model.predict(images)

# %%
# Ask for a difference, not only for two means
# --------------------------------------------
# The second table pairs methods by client and seed, and gives an interval for the difference. It says itself that two
# seeds are few.

print(results.table())

# %%
# Where to go from here
# ---------------------
# ``results.report("report.html")`` writes all tables and figures to one page. On the command line the same run is
# ``apfl run --methods local_ridge,afl,apfl --clients 5 --seeds 2``. To use your own rows, go on with
# :doc:`tutorial_3_embeddings` or :doc:`tutorial_4_tables`.
