"""
Text and tables with natural clients
====================================

Real federations are not drawn from a Dirichlet distribution: each hospital has its own patients, each author an own
style. This page takes the clients as they are, once with text and once with a table.
"""

# %%
# Text: who wrote what, at five "authors"
# ----------------------------------------
# Each module of Python's standard library is a client with a style of its own. Its lines are code, comment or
# docstring. We hide the tell-tale ``#`` and quotation marks, so the words have to do.

import ast
import inspect
import io
import tokenize
from importlib import import_module

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from sklearn.datasets import load_breast_cancer
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import HashingVectorizer

import apfl

AUTHORS = ["argparse", "ast", "datetime", "inspect", "threading"]
LINES = 300  # of each, to keep this page fast


def lines_of(module):
    """Each line of a module with its kind."""
    source = inspect.getsource(import_module(module))
    nodes = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (node for node in ast.walk(ast.parse(source)) if isinstance(node, nodes) and ast.get_docstring(node))
    quoted = [node.body[0] for node in found]
    docs = {number for each in quoted for number in range(each.lineno, each.end_lineno + 1)}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {each.start[0] for each in tokens if each.type == tokenize.COMMENT and each.line.strip()[0] == "#"}
    for number, line in enumerate(source.splitlines(), 1):
        words = line.strip().strip("#\"' ")
        if len(words) > 10:
            kind = "docstring" if number in docs else "comment" if number in comments else "code"
            yield {"author": module, "kind": kind, "words": words}


text = pd.DataFrame([row for module in AUTHORS for row in lines_of(module)])
text = text.groupby("author").sample(LINES, random_state=0)
text.groupby("author")["kind"].value_counts().unstack(fill_value=0)

# %%
# Features of text are usually those of a sentence encoder. Here a hashed bag of character triples, reduced to 64
# numbers, keeps the page small. A hash needs no fitting, so all clients have it alike. The reduction would have to be
# agreed on too: from public text, say.

hashed = HashingVectorizer(analyzer="char_wb", ngram_range=(1, 3), n_features=2**12).transform(text["words"])
embeddings = TruncatedSVD(64, random_state=0).fit_transform(hashed)

narrow = {"apfl": {"d_primary": 256, "d_refinement": 256}}  # default: as wide as the rows allow
data = apfl.load_data(embeddings, text["kind"].to_numpy(), columns={"author": text["author"].to_numpy()}, name="lines")
results = apfl.run(data, ["local_ridge", "afl", "apfl"], client_column="author", seeds=1, settings=narrow)
results

# %%
figure = results.plot("clients")
plt.show()

# %%
# Tables: columns as they are
# ---------------------------
# A DataFrame or a CSV needs no preparation: all numeric columns but the named ones are features. The rows are real
# measurements of tumours; the clinic is invented from one of them, so clinics differ as a catchment area might.

table = load_breast_cancer(as_frame=True)
frame = table.data.assign(diagnosis=np.array(["malignant", "benign"])[table.target])
frame["clinic"] = pd.qcut(frame["mean texture"], 4, labels=["east", "north", "south", "west"]).astype(str)
frame["patient"] = np.arange(len(frame))

named = {"label_column": "diagnosis", "client_column": "clinic", "drop": "patient"}
results = apfl.run(frame, ["local_ridge", "afl", "apfl"], **named, seeds=2, settings=narrow)
results

# %%
# Accuracy is not all if classes are rare. The records also have the balanced accuracy and the recall of each class.

results.to_frame()[["method", "seed", "accuracy_client_mean", "balanced_accuracy_client_mean"]].round(3)

# %%
# On the command line
# -------------------
# ``apfl run --data table.csv --label-column diagnosis --client-column clinic --drop patient`` prints which columns are
# features, and hints at categories, missing values and scales; see :doc:`/features`.
