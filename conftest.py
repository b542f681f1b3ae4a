"""Doctests of modules that need an extra are collected where it is installed."""

from importlib.util import find_spec

NEED_FLOWER = ["src/apfl/federate/flower/*", "tests/federate/masked/killed_site.py"]
collect_ignore_glob = [] if find_spec("flwr") else NEED_FLOWER
