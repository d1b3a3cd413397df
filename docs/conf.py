"""Sphinx settings of the documentation: python -m sphinx -W -n docs build/docs"""

from __future__ import annotations

import sys
from pathlib import Path

from sphinx.ext.napoleon import GoogleDocstring

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "src"))

import longspan  # noqa: E402 - this checkout's, whatever else is installed

project = "Longspan"
author = "The Longspan authors"
copyright = "The Longspan authors, Apache-2.0"  # noqa: A001 - Sphinx's name for it
version = release = longspan.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["images"]
root_doc = "index"
html_theme = "furo"
html_title = f"Longspan {release}"
html_show_sourcelink = False
html_copy_source = False

myst_heading_anchors = 3

# Docstrings say `name` for code, as Markdown does; to reStructuredText that is the default role.
default_role = "code"
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100

# Names of other packages, and of classes that annotations mention but that are not public.
nitpick_ignore_regex = [
    ("py:.*", r"(torch|numpy|collections|pathlib|typing)\..*"),
    ("py:class", r"longspan\.masks\.functions\.reads\.Reads"),
    ("py:class", r"longspan\.(schedules|execution|testing|training|viz|integrations)(\.[a-z_]+)+\._?[A-Z]\w+"),
]


def lists_of_arguments(app, what, name, obj, options, lines):  # noqa: ARG001 - Sphinx's own signature
    """`Args:` and `Returns:` as lists. Functions only: napoleon takes "word: text" of an attribute for its type."""
    if what in ("function", "method"):
        lines[:] = GoogleDocstring(lines).lines()


def setup(app):
    app.connect("autodoc-process-docstring", lists_of_arguments)
