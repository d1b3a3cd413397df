"""No import cycles, no modules hidden by an export of their package, no missing files in ARCHITECTURE.md."""

import ast
import importlib
import re
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import pytest

import longspan

pytestmark = pytest.mark.quick

SRC = Path(longspan.__file__).parent
MODULES = {
    ".".join(("longspan", *path.relative_to(SRC).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(SRC.rglob("*.py"))
}

OPTIONAL = {"huggingface", "torchtitan"}  # they import frameworks that may be missing


@lru_cache(maxsize=1)
def import_graph():
    return {name: set(imported(ast.parse(path.read_text()))) for name, path in MODULES.items()}


def imported(tree):
    """Modules of the package that a module imports, inside of functions and for types included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module


def circles(graph):
    """Sets of modules that reach each other.

    >>> circles({"a": {"b"}, "b": {"a", "c"}, "c": set()})
    [['a', 'b']]
    """
    reach = {name: set(targets) - {name} for name, targets in graph.items()}
    for middle in graph:
        for name in graph:
            if middle in reach[name]:
                reach[name] |= reach[middle]
    found = {tuple(sorted({name} | {o for o in reach[name] if name in reach[o]})) for name in graph}
    return sorted(list(circle) for circle in found if len(circle) > 1)


def test_no_import_circles():
    assert not circles(import_graph())


def test_the_search_finds_circles():
    graph = {name: set(modules) for name, modules in import_graph().items()}
    graph["longspan.spans"].add("longspan.masks.bands")
    assert ["longspan.masks.bands", "longspan.spans"] in circles(graph)


def test_no_module_is_hidden_by_what_its_package_exports():
    hidden = []
    for name, path in MODULES.items():
        package, _, child = name.rpartition(".")
        if child == "triton_kernels" and importlib.util.find_spec("triton") is None:
            continue
        if package and path.name != "__main__.py" and not OPTIONAL & set(name.split(".")):
            importlib.import_module(name)
            if not isinstance(getattr(importlib.import_module(package), child), ModuleType):
                hidden.append(name)
    assert not hidden


def test_files_that_architecture_names_exist():
    text = (SRC.parent.parent / "ARCHITECTURE.md").read_text()
    named = set(re.findall(r"`((?:\w+/)+\w+\.py)`", text))
    assert len(named) > 15
    assert not [name for name in named if not list(SRC.parent.rglob(name))]


def test_files_that_architecture_names_by_their_last_word_exist():
    text = (SRC.parent.parent / "ARCHITECTURE.md").read_text()
    known = {path.name for path in MODULES.values()}
    assert not set(re.findall(r"`(\w+\.py)`", text)) - known
