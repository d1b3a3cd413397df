"""The house, as tests: no import circles, no hidden modules, one class for a name, few parameters, small rooms, one
meaning for a word."""

import ast
import importlib
import re
from collections import defaultdict
from pathlib import Path
from types import ModuleType

import pytest

import longspan

SRC = Path(longspan.__file__).parent
MODULES = {
    ".".join(("longspan", *path.relative_to(SRC).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(SRC.rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}
MOST_PARAMETERS, MOST_FILES, MOST_WORDS = 7, 14, 45


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
    assert not circles({name: set(imported(tree)) for name, tree in TREES.items()})


def test_the_search_finds_circles():
    graph = {name: set(imported(tree)) for name, tree in TREES.items()}
    graph["longspan.span"].add("longspan.masks.bands")
    assert ["longspan.masks.bands", "longspan.span"] in circles(graph)


def test_no_module_is_hidden_by_what_its_package_exports():
    hidden = []
    for name, path in MODULES.items():
        package, _, child = name.rpartition(".")
        if child == "triton_kernels" and importlib.util.find_spec("triton") is None:
            continue
        if package and "integrations" not in name and path.name != "__main__.py" and child != "watcher":
            importlib.import_module(name)
            if not isinstance(getattr(importlib.import_module(package), child), ModuleType):
                hidden.append(name)
    assert not hidden


def test_no_two_classes_share_a_name():
    places = defaultdict(list)
    for name, tree in TREES.items():
        for node in tree.body:  # those inside of classes have the outer name as well
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
    assert not {word: where for word, where in places.items() if len(where) > 1}


# Signatures that others made: PyTorch's operators, and what host frameworks call.
FOREIGN = {
    ("longspan.execution.ops", "run_forward"),
    ("longspan.execution.ops", "run_backward"),
    ("longspan.integrations.huggingface.attention", "longspan_attention"),
    ("longspan.integrations.pytorch.routes", "sdpa"),
}


def parameters(function):
    found = function.args
    names = [a.arg for a in (*found.posonlyargs, *found.args, *found.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


def is_free(name, function):
    """Whether a function may have many: a public one with keyword-only options, an operator (all by position), or a
    Triton kernel."""
    public = not function.name.startswith("_") and function.args.kwonlyargs
    foreign = (name, function.name) in FOREIGN or name.endswith(("._torch", "._torch_compiler", ".triton_kernels"))
    return public or function.args.posonlyargs or foreign


def test_functions_have_few_parameters():
    many = [
        f"{name}:{node.lineno}: {node.name} has {len(parameters(node))}"
        for name, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and not is_free(name, node) and len(parameters(node)) > MOST_PARAMETERS
    ]
    assert not many, "\n".join(many)


@pytest.mark.parametrize("folder", sorted({path.parent for path in MODULES.values()}), ids=lambda p: p.name)
def test_rooms_are_small(folder):
    assert len(list(folder.glob("*.py"))) <= MOST_FILES


def glossary():
    text = (SRC.parent.parent / "ARCHITECTURE.md").read_text()
    table = text.partition("## Words")[2].partition("\n## ")[0]
    return re.findall(r"^\| ([\w ]+?) \|", table, re.M)[1:]


def test_the_glossary_is_short_and_says_each_word_once():
    words = glossary()
    assert 30 <= len(words) <= MOST_WORDS
    assert len(set(words)) == len(words)


def test_files_that_architecture_names_exist():
    text = (SRC.parent.parent / "ARCHITECTURE.md").read_text()
    named = set(re.findall(r"`((?:\w+/)+\w+\.py)`", text))
    assert len(named) > 15
    assert not [name for name in named if not list(SRC.parent.rglob(name))]


def test_files_that_architecture_names_by_their_last_word_exist():
    text = (SRC.parent.parent / "ARCHITECTURE.md").read_text()
    known = {path.name for path in MODULES.values()}
    assert not set(re.findall(r"`(\w+\.py)`", text)) - known
