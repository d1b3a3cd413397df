"""Sphinx settings of the documentation: python -m sphinx -W -n docs build/docs"""

from __future__ import annotations

import re
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

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
]
exclude_patterns = ["images", "inventories", "**.ipynb_checkpoints"]
root_doc = "index"
html_theme = "furo"
html_title = f"Longspan {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
pygments_dark_style = "github-dark"
html_show_sourcelink = False
html_copy_source = False

myst_heading_anchors = 3
nb_execution_mode = "off"  # tests/house/test_notebooks.py runs them; here they are shown with what is stored

# Copied without what is not typed: a shell's prompt, Python's, and lines of output between them.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_exclude = ".linenos, .gp, .go"
copybutton_selector = ", ".join(
    f"div.{kind} pre"
    for kind in (
        "highlight-python",
        "highlight-bash",
        "highlight-pycon",
        "highlight-diff",
        "doctest",
    )
)

# Names of other packages, where their pages are. Kept here, so that building needs no network; a name that is in
# neither these lists nor our own pages is a warning.
intersphinx_mapping = {
    "torch": ("https://docs.pytorch.org/docs/stable/", "inventories/torch.inv"),
    "numpy": ("https://numpy.org/doc/stable/", "inventories/numpy.inv"),
    "python": ("https://docs.python.org/3/", "inventories/python.inv"),
}

# Docstrings say `name` for code, as Markdown does; to reStructuredText that is the default role.
default_role = "code"
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
# By these names, not by all that they stand for, in three lines.
autodoc_type_aliases = {
    "ArrayLike": "numpy.typing.ArrayLike",
    **{name: name for name in ("Documents", "Group", "ScoreMod")},
}
# Types that are imported for type checkers alone come without their module; these have pages elsewhere.
FULL_NAMES = {
    "Tensor": "torch.Tensor",
    **{
        name: f"torch.nn.attention.flex_attention.{name}"
        for name in ("BlockMask", "AuxRequest", "AuxOutput")
    },
}
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

# Classes that annotations mention but that are not public, and names for several types at once.
nitpick_ignore_regex = [
    ("py:class", "Documents|Group|ScoreMod|Options|Table|ConvPlan|ScanPlan"),
    ("py:class", r"longspan\.layouts\.layout\.X|numpy\._typing\..*"),
    ("py:class", r"longspan\.masks\.captures\.Reads"),
    (
        "py:class",
        r"longspan\.(planning|run|scoring|watch|testing|training|viz|huggingface|torch_api)(\.[a-z_]+)+\._?[A-Z]\w+",
    ),
]


def lists_of_arguments(app, what, name, obj, options, lines):  # noqa: ARG001 - Sphinx's own signature
    """`Args:` and `Returns:` as lists. Functions only: napoleon takes "word: text" of an attribute for its type."""
    if what in ("function", "method"):
        lines[:] = GoogleDocstring(lines).lines()


def plain_aliases(app, what, name, obj, options, signature, returned):  # noqa: ARG001 - Sphinx's own signature
    """In a union Sphinx prints an alias as its own object, `TypeAliasForwardRef('x')`; here it is x again."""
    return tuple(
        text and re.sub(r"TypeAliasForwardRef\('([\w.]+)'\)", r"\1", text)
        for text in (signature, returned)
    )


def full_names(app, env, node, contnode):  # noqa: ARG001 - Sphinx's own signature
    """Before intersphinx looks for a name: it knows whole ones."""
    node["reftarget"] = FULL_NAMES.get(node.get("reftarget"), node.get("reftarget"))


def setup(app):
    app.connect("missing-reference", full_names, priority=400)
    app.connect("autodoc-process-signature", plain_aliases)
    app.connect("autodoc-process-docstring", lists_of_arguments)
