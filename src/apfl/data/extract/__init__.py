"""Samples through a backbone: once, cached on disk, resumable."""
