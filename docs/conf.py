"""Sphinx settings: `make docs`."""

import json
import os
from importlib.metadata import version as installed

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tutorials are small; threads would only wait for each other

project = "apfl"
release = installed("apfl")
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_gallery.gen_gallery",
    "sphinx_llms_txt",
]
source_suffix = {".md": "markdown", ".rst": "restructuredtext"}
exclude_patterns = ["_build"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
# Links that lead out of docs/ work if the repository is browsed; tests/test_docs.py checks every link of every page.
suppress_warnings = ["myst.xref_missing"]

html_theme = "furo"
html_title = f"apfl {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
templates_path = ["_templates"]
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "versions.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
# `scripts/site` builds several versions side by side and names them here: [{"name": "0.1.0", "address": "../0.1.0/"}].
html_context = {"versions": json.loads(os.environ.get("APFL_VERSIONS", "[]"))}

# The tutorials: scripts that are run while the pages are built. One that fails, fails the build.
sphinx_gallery_conf = {
    "examples_dirs": "../examples/tutorials",
    "gallery_dirs": "tutorials",
    "filename_pattern": r"tutorial_",
    "within_subsection_order": "FileNameSortKey",
    "only_warn_on_example_error": False,
    "abort_on_example_error": True,
    "download_all_examples": False,
    "show_memory": False,
    "remove_config_comments": True,
    "capture_repr": ("_repr_html_", "__repr__"),
    "min_reported_time": 0,
}

llms_txt_title = "apfl"
llms_txt_summary = (
    "Analytic personalised federated learning: each site sends additive statistics of frozen features once; a server "
    "solves one ridge regression for all; each site fits a private ridge to its errors. No gradients, no rounds."
)
