"""Sphinx settings: `make docs`."""

from importlib.metadata import version as installed

project = "apfl"
release = installed("apfl")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"apfl {release}"
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
suppress_warnings = ["myst.xref_missing"]  # links that lead out of docs/ work where the repository is browsed
