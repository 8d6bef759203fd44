"""Sphinx settings; `make docs` builds the pages into docs/_build/html."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

import mvngrad
from mvngrad_lab.report.figures.style import DARK, LIGHT

project = "mvngrad"
author = "mvngrad contributors"
project_copyright = author
version = release = mvngrad.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton", "mvngrad_docs"]
myst_enable_extensions = ["amsmath", "colon_fence", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "_ext", "examples"]
default_role = "py:obj"
smartquotes = False  # options have two hyphens

autodoc_typehints = "none"
autodoc_mock_imports = ["lightning", "timm", "transformers"]
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
python_maximum_signature_line_length = 80
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

html_theme = "furo"
html_title = f"mvngrad {release}"
html_theme_options = {"light_css_variables": LIGHT, "dark_css_variables": DARK}  # the colours of figures
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_use_index = False
pygments_style = "a11y-light"
pygments_dark_style = "a11y-dark"
