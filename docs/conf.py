"""How Sphinx builds the site from the pages in this folder; `make docs` calls it.

Sphinx with MyST and Furo: the pages are Markdown that GitHub shows as well, autodoc reads the docstrings, and both are
maintained, while MkDocs has had no release since 2024, Material for MkDocs gets fixes only, and its successor is young.
"""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from repository import source_line

project = "Compressive Transformer"
html_title = "Compressive Transformer"
version = release = metadata.version("compressive-transformer")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.linkcode",
    "sphinx_copybutton",
    "repository",
]
exclude_patterns = ["**/__pycache__"]

myst_heading_anchors = 4  # links to headings are those that GitHub makes
# Not "file", which Markdown takes for a link of the machine and leaves as text.
myst_url_schemes = {"http": None, "https": None, "repository": "source/{{path}}.html", "plain": "source/{{path}}"}

default_role = "code"  # docstrings write `names` in single backticks
autoclass_content = "both"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
linkcode_resolve = source_line

html_theme = "furo"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_show_copyright = False
html_show_sourcelink = False
html_copy_source = False
copybutton_prompt_text = "$ "
