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
nb_execution_mode = (
    "off"  # tests/house/test_notebooks.py runs them; here the stored output is shown
)

# The copy button omits prompts of the shell and of Python, and lines of output between them.
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

# Inventories of other packages' pages. Stored here, so that building needs no network; a name that is in
# neither these lists nor our own pages is a warning.
intersphinx_mapping = {
    "torch": ("https://docs.pytorch.org/docs/stable/", "inventories/torch.inv"),
    "numpy": ("https://numpy.org/doc/stable/", "inventories/numpy.inv"),
    "python": ("https://docs.python.org/3/", "inventories/python.inv"),
}

# Docstrings use `name` for code, as in Markdown; in reStructuredText that is the default role.
default_role = "code"
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
# Print these aliases by name instead of expanding them.
autodoc_type_aliases = {
    "ArrayLike": "numpy.typing.ArrayLike",
    **{name: name for name in ("Documents", "Group", "ScoreMod")},
}
# Types that are imported only for type checkers come without their module; these have pages elsewhere.
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

# Private classes in annotations, and aliases of several types.
nitpick_ignore_regex = [
    (
        "py:class",
        r"Axes|Figure|Rectangle|numpy\.float64|contextlib\.AbstractContextManager",
    ),
    ("py:class", "Documents|Group|ScoreMod|Options|Table|ConvPlan|ScanPlan"),
    (
        "py:class",
        r"longspan\.layouts\.layout\.X|numpy\._typing\..*",
    ),
    (
        "py:class",
        r"longspan\.(planning|run|scoring|testing|training|viz|huggingface|torch_api)(\.[a-z_]+)+\._?[A-Z]\w*",
    ),
]


def lists_of_arguments(app, what, name, obj, options, lines):  # noqa: ARG001 - Sphinx's own signature
    """Format `Args:` and `Returns:` as lists. Functions only: napoleon reads "word: text" of attributes as a type."""
    if what in ("function", "method"):
        lines[:] = GoogleDocstring(lines).lines()


def plain_aliases(app, what, name, obj, options, signature, returned):  # noqa: ARG001 - Sphinx's own signature
    """Replace `TypeAliasForwardRef('x')`, which Sphinx prints for an alias in a union, by x."""
    return tuple(
        text and re.sub(r"TypeAliasForwardRef\('([\w.]+)'\)", r"\1", text)
        for text in (signature, returned)
    )


def full_names(app, env, node, contnode):  # noqa: ARG001 - Sphinx's own signature
    """Complete a name for intersphinx, which only knows qualified names."""
    node["reftarget"] = FULL_NAMES.get(node.get("reftarget"), node.get("reftarget"))


def setup(app):
    app.connect("missing-reference", full_names, priority=400)
    app.connect("autodoc-process-signature", plain_aliases)
    app.connect("autodoc-process-docstring", lists_of_arguments)
