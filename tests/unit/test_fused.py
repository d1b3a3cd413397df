"""The Triton kernels: by Triton's interpreter against PyTorch's operators, and compiled to machine code for GPUs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.jobs.runner import ROOT

pytest.importorskip("triton", reason="Triton is not installed")
KERNELS = ROOT / "src" / "longspan" / "run" / "triton_kernels.py"
LIMIT = 1e-6

MUTANTS = {
    "rows that saw nothing are nan": ('tl.where(high_top == float("-inf"), 0.0, high_top)', "high_top", "merge"),
    "the maximum is not kept": ("tl.store(at_top, high_top", "tl.store(at_top, old_top", "merge"),
    "the sum is not scaled": ("old_num * old + new", "old_num + new", "merge"),
    "rows beyond the end are written": ("i, i < rows\n", "i, i < rows + 3\n", "merge"),
    "rows of both are one's": ("state, part = line + 7, line + 4", "state, part = line + 7, line + 7", "merge"),
    "finished rows are not divided": ("tl.store(at_out, mean.to(", "tl.store(at_out, whole.to(", "merge"),
    "the logarithm of the sum is not added": ("old_top + tl.log(old_num)", "old_top", "merge"),
    "heads are batch rows": (
        "return line, plane // heads, plane % heads",
        "return line, plane % heads, plane // heads",
        "moves",
    ),
    "the search ends one step early": ("for _ in range(steps)", "for _ in range(steps - 1)", "moves"),
    "a run's first program is not subtracted": ("block = program - tl.load(line)", "block = program", "moves"),
    "parts of messages lie as tensors do": ("tl.where(is_part, ", "tl.where(is_part & (b < 0), ", "moves"),
    "the stride of heads is that of batch rows": ("x + b * y + h * z", "x + b * y + h * y", "moves"),
    "the first token is not counted": ("(y + h) * by_head + z * by_token", "(y + h) * by_head", "moves"),
    "rows go where they came from": ("_offset(line + 7, (flags & INTO", "_offset(line + 4, (flags & INTO", "moves"),
    "what should be added replaces": ("whole + part.to(TARGET)", "part.to(TARGET)", "moves"),
    "features beyond the last are written": (
        "(d < dim)[None, :]\n    offset",
        "(d < dim + 2)[None, :]\n    offset",
        "moves",
    ),
    "products are sums in the dtype of rows": (
        "other=0.0).to(WIDE) * tl.load(at_out, mask=cells, other=0.0).to(WIDE)",
        "other=0.0) * tl.load(at_out, mask=cells, other=0.0)",
        "products",
    ),
    "features beyond the last are summed": (
        "(d < dim)[None, :]\n    at_dout",
        "(d < dim + 2)[None, :]\n    at_dout",
        "products",
    ),
    "the output lies as its gradient does": (
        "b * out_b + h * out_h, i, out_t",
        "b * dout_b + h * dout_h, i, dout_t",
        "products",
    ),
    "sums of one plane are written": ("sums + plane * tokens + i", "sums + i", "products"),
    "the last rows have no sum": ("known = i < tokens", "known = i < tokens - 1", "products"),
    "the second move is the first": ("if (flags & SECOND) != 0:", "if (flags & SECOND) > 1:", "moves"),
}


def interpreted(*args):
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernel_models.fused_script", *map(str, args)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_kernels_do_what_operators_do():
    """160 random cases in guarded memory, and whole plans with the kernels in the place of PyTorch's operators."""
    (found,) = interpreted()
    assert found["merge"] <= LIMIT
    assert found["moves"] == 0.0
    assert found["products"] <= 1.0
    assert found["runs"] <= LIMIT
    assert found["calls"] >= 50


@pytest.mark.nightly
def test_wrong_kernels_are_caught(tmp_path):
    source, paths = KERNELS.read_text(), []
    for number, (text, other, _) in enumerate(MUTANTS.values()):
        assert text in source
        paths.append(tmp_path / f"mutant_{number}.py")
        paths[-1].write_text(source.replace(text, other))
    found = interpreted(*paths)
    assert len(found) == len(MUTANTS)
    limits = {"merge": LIMIT, "moves": LIMIT, "products": 1.0}
    alive = [
        name for (name, (*_, kind)), errors in zip(MUTANTS.items(), found, strict=True) if errors[kind] <= limits[kind]
    ]
    assert not alive


@pytest.mark.share(4)
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("kind", ["*bf16", "*fp16", "*fp32"])
def test_kernels_become_machine_code(capability, kind, tmp_path, record_property):
    """For A100, H100 and B200, without any of them: registers and shared memory are known then."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from longspan.run.triton_kernels import products_kernel, rows_kernel, state_kernel

    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    ptxas = folder / ("ptxas-blackwell" if capability >= 90 else "ptxas")
    shared = {"ROWS": 16, "ALIGNED": True}
    words = dict.fromkeys(("source", "target", "source2", "target2"), "*i32")
    sums = dict.fromkeys(("source", "source2"), kind) | dict.fromkeys(("target", "target2"), "*fp32")
    state = dict.fromkeys(("acc", "top", "num", "lse"), "*fp32") | {"out": kind}
    wide = {"TINY": 1e-38, "DIM": 128}
    launches = [
        (rows_kernel, words, {"KIND": 0, "DIM": 64}),
        (rows_kernel, words, {"KIND": 2, "DIM": 64}),
        (rows_kernel, sums, {"KIND": 1, "DIM": 128}),
        (state_kernel, state, wide | {"FINISH": False}),
        (state_kernel, state, wide | {"FINISH": True}),
        (products_kernel, {"dout": kind, "out": kind, "sums": "*fp32"}, {"DIM": 128}),
    ]
    for kernel, pointers, more in launches:
        constants = shared | more
        pointers = pointers | ({"table": "*i64"} if "table" in kernel.arg_names else {})
        signature = {name: "constexpr" if name in constants else pointers.get(name, "i64") for name in kernel.arg_names}
        places = {name: (kernel.arg_names.index(name),) for name in kernel.arg_names}
        aligned = {places[name]: [["tt.divisibility", 16]] for name in pointers}
        source = ASTSource(kernel, signature, {places[name]: n for name, n in constants.items()}, aligned)
        compiled = triton.compile(source, GPUTarget("cuda", capability, 32), {"enable_fp_fusion": False})
        assert len(compiled.asm["cubin"]) > 0
        ptx = tmp_path / "kernel.ptx"
        ptx.write_text(compiled.asm["ptx"])
        arch = re.search(r"\.target (\w+)", compiled.asm["ptx"])[1]
        command = [str(ptxas), "-v", f"--gpu-name={arch}", str(ptx), "-o", str(tmp_path / "kernel.cubin")]
        told = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stderr
        registers = int(re.search(r"Used (\d+) registers", told)[1])
        assert "0 bytes spill stores" in told
        assert re.search(r"(ld|st)\.global.*\.v[24]\.b32", compiled.asm["ptx"]), "reads or writes are not vectors"
        assert registers <= 168  # three blocks of 128 threads on a multiprocessor
        record_property(
            f"{kernel.__name__} {len(list(tmp_path.iterdir()))} sm_{capability} {kind}",
            f"{registers} registers, {compiled.metadata.shared} B",
        )
