"""The gate: nothing in src can run what it was not given as code, open a connection, or take bytes for objects.

It reads the syntax tree of every file, so words in comments and texts do not matter. The gate itself is tried on
snippets that it must refuse.
"""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import longspan

SRC = Path(longspan.__file__).parent
ROOT = SRC.parent.parent

MODULES = {
    **dict.fromkeys(("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"), "pickles"),
    **dict.fromkeys(("copyreg", "pickletools", "jsonpickle"), "pickles"),
    **dict.fromkeys(("socket", "socketserver", "ssl", "http", "urllib", "urllib3", "requests", "httpx"), "connects"),
    **dict.fromkeys(("ftplib", "smtplib", "telnetlib", "xmlrpc", "webbrowser", "asyncio", "aiohttp"), "connects"),
    **dict.fromkeys(("yaml", "ctypes", "cffi", "runpy", "code", "codeop", "pty"), "runs what it is given"),
}
BUILTINS = {"eval", "exec", "compile", "__import__", "input", "breakpoint"}
CALLS = {
    "torch.load": "unpickles",
    "torch.save": "pickles",
    "torch.jit.load": "runs what it is given",
    "torch.hub.load": "connects and runs what it is given",
    "torch.utils.cpp_extension.load_inline": "runs what it is given",
    "numpy.load": "may unpickle",
    "np.load": "may unpickle",
    "os.system": "runs a shell",
    "os.popen": "runs a shell",
    "subprocess.getoutput": "runs a shell",
    "subprocess.getstatusoutput": "runs a shell",
    "tempfile.mktemp": "can be raced",
}
OBJECTS = re.compile(r"\w+_object(_list)?$")
HOSTS = re.compile(r"\b(?:https?|ftp|tcp|wss?)://(?!www\.w3\.org/)", re.IGNORECASE)
INDEXES = re.compile(r"--?(extra-)?index-url|--find-links|--trusted-host|PIP_(EXTRA_)?INDEX_URL", re.IGNORECASE)


def findings(source: str):
    """(line, what) of everything that the gate refuses."""
    tree = ast.parse(source)
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    own_hash = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name == "__hash__"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in MODULES:
                    yield line, f"import {alias.name}: {MODULES[alias.name.split('.')[0]]}"
        elif isinstance(node, ast.ImportFrom) and node.module:
            if node.module.split(".")[0] in MODULES:
                yield line, f"from {node.module}: {MODULES[node.module.split('.')[0]]}"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if full in CALLS or OBJECTS.fullmatch(alias.name):
                    yield line, f"{full}: {CALLS.get(full, 'pickles')}"
        elif isinstance(node, ast.Name) and node.id in BUILTINS and isinstance(node.ctx, ast.Load):
            yield line, f"{node.id}: runs what it is given"
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if name in CALLS:
                yield line, f"{name}: {CALLS[name]}"
            elif OBJECTS.fullmatch(node.attr) and ast.unparse(node.value) in ("dist", "torch.distributed", "c10d"):
                yield line, f"{name}: pickles"
        elif isinstance(node, ast.Call):
            yield from _calls(node, id(node) in own_hash)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            if HOSTS.search(node.value):
                yield line, f"{node.value[:40]!r}: a host"
            if INDEXES.search(node.value):
                yield line, f"{node.value[:40]!r}: another index"


def _calls(node: ast.Call, in_hash: bool):
    name, words = ast.unparse(node.func), {word.arg: word.value for word in node.keywords}
    if name == "hash" and not in_hash:
        yield node.lineno, "hash(): differs from process to process, so nothing may be named by it"
    shell = words.get("shell")
    if shell is not None and not (isinstance(shell, ast.Constant) and shell.value is False):
        yield node.lineno, f"{name}(shell=...): runs a shell"
    if "allow_pickle" in words:
        yield node.lineno, f"{name}(allow_pickle=...): unpickles"
    if name.split(".")[-1] in ("load", "load_all") and name.split(".")[0] == "yaml":
        yield node.lineno, f"{name}: runs what it is given"


@pytest.mark.parametrize("path", sorted(SRC.rglob("*.py")), ids=lambda path: str(path.relative_to(SRC)))
def test_gate(path):
    here = path.relative_to(SRC).as_posix()
    wrong = [f"{here}:{line}: {what}" for line, what in findings(path.read_text())]
    assert not wrong, "\n".join(wrong)


REFUSED = {
    "import pickle": "pickles",
    "import os, pickle as p": "pickles",
    "from pickle import loads": "pickles",
    "def f():\n    import dill": "pickles",
    "import marshal": "pickles",
    "from shelve import open": "pickles",
    "import yaml\nyaml.load(x)": "runs",
    "import torch\ntorch.load('x', weights_only=True)": "unpickles",
    "from torch import load": "unpickles",
    "import torch\ntorch.save({}, 'x')": "pickles",
    "dist.all_gather_object(a, b)": "pickles",
    "torch.distributed.broadcast_object_list(a)": "pickles",
    "from torch.distributed import all_gather_object": "pickles",
    "run = dist.gather_object": "pickles",
    "eval('1')": "runs",
    "exec(text)": "runs",
    "run = eval": "runs",
    "compile(text, 'x', 'exec')": "runs",
    "__import__(name)": "runs",
    "import subprocess\nsubprocess.run(x, shell=True)": "shell",
    "import subprocess\nsubprocess.run(x, shell=flag)": "shell",
    "import os\nos.system(x)": "shell",
    "import os\nos.popen(x)": "shell",
    "name = str(hash(plan))": "hash()",
    "import socket": "connects",
    "from urllib.request import urlopen": "connects",
    "import http.client": "connects",
    "x = 'https://example.org/x'": "a host",
    "x = f'http://{host}/x'": "a host",
    "x = 'tcp://10.0.0.1:80'": "a host",
    "x = 'pip install --extra-index-url y'": "another index",
    "import numpy as np\nnp.load(f, allow_pickle=True)": "unpickle",
    "np.lib.format.open_memmap(f, allow_pickle=True)": "unpickles",
    "import ctypes": "runs",
}


@pytest.mark.parametrize("source", REFUSED, ids=range(len(REFUSED)))
def test_the_gate_refuses(source):
    found = list(findings(source))
    assert any(REFUSED[source] in what for _, what in found), found
    assert all(line >= 1 for line, _ in found)


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.compile(f)",
        "model.eval()",
        "'''See https://example.org.'''",
        "class A:\n    def __hash__(self):\n        return hash(self.x)",
        "import subprocess\nsubprocess.run([x], check=True)",
        "x = '<svg xmlns=\"http://www.w3.org/2000/svg\">'",
        "found_object = 3",
        "# import pickle",
    ],
)
def test_the_gate_lets_through(source):
    assert not list(findings(source))


def test_no_file_of_the_project_names_another_index():
    files = [ROOT / "pyproject.toml", *(ROOT / ".ci").glob("*"), *ROOT.glob("requirements*.txt")]
    for path in files:
        if path.is_file():
            wrong = [n for n, text in enumerate(path.read_text().splitlines(), 1) if INDEXES.search(text)]
            assert not wrong, f"{path.name}: lines {wrong} name an index"


# -- what goes with a release ------------------------------------------------------------------------------------------


def test_the_sbom_lists_what_is_installed(tmp_path):
    path = tmp_path / "sbom.json"
    run = [sys.executable, str(ROOT / ".ci" / "sbom.py"), str(path)]
    subprocess.run(run, check=True, timeout=120)
    sbom = json.loads(path.read_text())
    assert (sbom["bomFormat"], sbom["specVersion"]) == ("CycloneDX", "1.6")
    assert sbom["metadata"]["component"]["name"] == "longspan"
    parts = {part["name"]: part for part in sbom["components"]}
    assert {"torch", "numpy"} <= parts.keys()
    assert parts["numpy"]["purl"] == f"pkg:pypi/numpy@{parts['numpy']['version']}"
    depends = {row["ref"]: row["dependsOn"] for row in sbom["dependencies"]}
    root = depends[sbom["metadata"]["component"]["bom-ref"]]
    assert {ref.split("@")[0] for ref in root} == {"pkg:pypi/torch", "pkg:pypi/numpy"}
    assert len({part["bom-ref"] for part in sbom["components"]}) == len(sbom["components"])
    again = tmp_path / "again.json"
    subprocess.run([*run[:2], str(again)], check=True, timeout=120)
    assert again.read_text() == path.read_text()  # nothing of the moment is in it
