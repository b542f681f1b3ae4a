"""Doctests of modules that need an extra are collected where it is installed."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("flwr") else ["src/apfl/federate/flower/*"]
