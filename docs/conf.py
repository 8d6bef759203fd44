"""Sphinx settings; `make docs` builds the pages into docs/_build/html."""

import mvngrad

project = "mvngrad"
author = "mvngrad contributors"
project_copyright = author
version = release = mvngrad.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
myst_enable_extensions = ["amsmath", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
default_role = "py:obj"

autodoc_typehints = "none"
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"mvngrad {release}"
