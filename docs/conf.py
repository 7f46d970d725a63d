"""Sphinx's settings. ``make docs`` builds the site from the Markdown pages, with this repository's root as its sources.

The pages therefore link to each other, to examples and to tests as on any page that shows Markdown, and a link that
leads nowhere ends the build, as every other warning does.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

project = "Syncline"
copyright = "the authors of Syncline, Apache License 2.0"
html_title = "Syncline"

extensions = ["myst_parser", "sphinx.ext.autodoc", "site_parts"]
root_doc = "docs/index"
include_patterns = ["*.md", "benchmarks/performance.md", "docs/**.md"]
exclude_patterns = [".*", "build", "demo", "docs/_build", "results", "src", "tests"]  # folders that need no search
nitpicky = True

html_theme = "furo"
html_static_path = ["style.css"]
html_css_files = ["style.css"]
html_copy_source = False
html_show_sphinx = False
highlight_language = "text"  # of blocks that name none
pygments_style = "default"
pygments_dark_style = "monokai"

myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_use_legacy_class_based = False
# The calls under JAX and TensorFlow are documented whether or not these are installed.
autodoc_mock_imports = ["syncline.frameworks.jax", "syncline.frameworks.tensorflow"]
# Types in signatures of other packages and of modules without a page have no target here.
nitpick_ignore_regex = [("py:.*", ".*")]
