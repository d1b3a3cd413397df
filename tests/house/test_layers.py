"""Imports point down, planning needs numpy alone, private torch names live in one place."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import longspan

pytestmark = pytest.mark.quick

SRC = Path(longspan.__file__).parent

# What each layer may import from the package; the order is that of ARCHITECTURE.md.
LAYERS = {
    "errors": 0,
    "formatting": 0,
    "versions": 0,
    "_compile": 0,
    "spans": 0,
    "_torch": 0,  # mask functions load it when they are called
    "masks": 1,
    "layouts": 2,
    "planning": 3,
    "derivatives": 4,
    "device_tables": 4,
    "tile": 4,
    "validate": 5,
    "scoring": 6,
    "kernels": 7,
    "run": 8,
    "mixers": 9,
    "testing": 10,
    "api": 11,
    "recurrences": 11,
    "scores": 11,
    "sizing": 12,
    "training": 12,
    "viz": 12,
    "verification": 13,
    "huggingface": 14,
    "torch_api": 14,
    "torchtitan": 14,
    "cli": 15,
    "__main__": 16,
    "__init__": 17,
}
PURE = {name for name, layer in LAYERS.items() if layer <= 3} - {"_torch"}


def modules():
    return sorted(SRC.rglob("*.py"))


def layer_of(path: Path) -> str:
    parts = path.relative_to(SRC).parts
    return parts[0].removesuffix(".py")


def imports(path: Path):
    """(line, module, at import time) of every import."""
    tree = ast.parse(path.read_text())
    inside = {
        id(node)
        for scope in ast.walk(tree)
        if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef)
        or (isinstance(scope, ast.If) and "TYPE_CHECKING" in ast.unparse(scope.test))
        for node in ast.walk(scope)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, id(node) not in inside
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: relative import; write longspan.x"
            for alias in node.names if node.module == "longspan" else [None]:
                yield node.lineno, node.module if alias is None else f"longspan.{alias.name}", id(node) not in inside


def test_every_module_has_a_layer():
    unknown = sorted({layer_of(path) for path in modules()} - LAYERS.keys())
    assert not unknown, f"give these a layer in tests/house/test_layers.py and ARCHITECTURE.md: {unknown}"


def test_imports_point_down():
    wrong = []
    for path in modules():
        here = layer_of(path)
        for line, module, _ in imports(path):
            if module.startswith("longspan."):
                there = module.split(".")[1]
                up = LAYERS[there] > LAYERS[here] or (
                    LAYERS[there] == LAYERS[here] and there != here and here not in ("spans", "_torch")
                )
                if up:
                    wrong.append(f"{path.relative_to(SRC.parent)}:{line}: {here} imports {module}")
    assert not wrong, "\n".join(wrong)


def test_the_planning_half_loads_no_torch():
    wrong = []
    for path in modules():
        if layer_of(path) in PURE | {"api", "__init__"}:
            for line, module, loads in imports(path):
                root = module.split(".")[0]
                if root == "torch" and (loads or "distributed" in module):
                    wrong.append(f"{path.relative_to(SRC.parent)}:{line}: imports {module} when it is loaded")
                elif root not in {"torch", "numpy", "longspan"} | sys.stdlib_module_names:
                    wrong.append(f"{path.relative_to(SRC.parent)}:{line}: {module} is not a dependency")
    assert not wrong, "\n".join(wrong)


def test_private_torch_names_live_in_one_file():
    private = re.compile(r"torch(\.\w+)*\._[a-zA-Z]|from torch[\w.]* import _|\b_higher_order_ops\b|testing\._internal")
    wrong = [
        f"{path.relative_to(SRC.parent)}:{number}: {line.strip()}"
        for path in modules()
        if path.name not in ("_torch.py", "_compile.py")  # the latter asks whether the compiler is loaded
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if private.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_kernel_imports_another():
    kernels = SRC / "kernels"
    names = {path.stem for path in kernels.glob("*.py")} - {"__init__", "contract", "panels"}
    for path in kernels.glob("*.py"):
        if path.stem in names:
            found = {m.rsplit(".", 1)[-1] for _, m, _ in imports(path) if m.startswith("longspan.kernels")}
            assert not found & names - {path.stem}, f"{path.name} imports {found & names}"


def test_importing_longspan_is_quick_and_brings_no_torch():
    code = (
        "import sys, time; begin = time.process_time(); import longspan; took = time.process_time() - begin;"
        "heavy = {'torch', 'matplotlib', 'transformers', 'scipy'} & set(sys.modules);"
        "assert not heavy, heavy; assert took < 2, took"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_eager_attention_loads_no_compiler():
    code = (
        "import sys, torch, longspan as ls; q = torch.randn(1, 2, 64, 16, requires_grad=True); ids = torch.arange(64);"
        "near = ls.masks.from_mask_mod(lambda b, h, i, j: ids[i] - ids[j] < 9, 64, within=ls.masks.causal());"
        "score = lambda s, b, h, i, j: s * (1 + h);"
        "mask = ls.masks.documents([40, 24]) & near;"
        "(ls.attention(q, q, q, mask) + ls.flex_attention(q, q, q, score)).sum().backward();"
        "heavy = {'torch._dynamo', 'torch.distributed.tensor'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_planning_works_without_torch():
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import longspan as ls\n"
        "mask = ls.masks.documents([700, 324]) & ls.masks.causal()\n"
        "layout = ls.layouts.balanced(mask, world_size=4)\n"
        "plan = ls.plan(mask, layout, q_heads=8, kv_heads=2, head_dim=64, dtype='bfloat16')\n"
        "assert 'compared' in str(plan)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_public_names_are_sorted_and_real():
    assert sorted(longspan.__all__) == longspan.__all__
    assert all(hasattr(longspan, name) for name in longspan.__all__)


def test_commands_load_no_torch_before_they_run():
    code = (
        "import sys; from longspan.cli.command import COMMANDS; import importlib;"
        "[importlib.import_module(f'longspan.cli.{name}') for name in COMMANDS];"
        "heavy = {'torch', 'matplotlib', 'transformers'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
