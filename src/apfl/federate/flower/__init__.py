"""The federation between machines, on Flower (flwr). Only this folder knows Flower's nouns.

`client_app` and `server_app` are thin over `apfl.federate`: they move its bytes and keep no state of their own.
"""
