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
KERNELS = ROOT / "src" / "longspan" / "execution" / "fused" / "triton_kernels.py"
LIMIT = 1e-6

MUTANTS = {
    "rows that saw nothing are nan": ('tl.where(high == float("-inf"), 0.0, high)', "high", "merge"),
    "the maximum is not kept": ("tl.store(at_top, high, mask=known)", "tl.store(at_top, old_top, mask=known)", "merge"),
    "the sum is not scaled": ("other=0.0) * old + new", "other=0.0) + new", "merge"),
    "rows beyond the end are written": ("known = i < rows", "known = i < rows + 3", "merge"),
    "rows of both are one's": ("tl.load(here + i, mask=known", "tl.load(there + i, mask=known", "merge"),
    "heads are batch rows": ("(plane // heads)", "(plane % heads)", "merge"),
    "rows go where they came from": ("place[:, None] * target_t", "row[:, None] * target_t", "moves"),
    "what should be added replaces": ("whole + part.to(whole.dtype)", "part.to(whole.dtype)", "moves"),
    "features beyond the last are written": ("(d < dim)[None, :]\n    row", "(d < dim + 2)[None, :]\n    row", "moves"),
    "the second move never adds": ("target2_t, ROWS, DIM, ADDS", "target2_t, ROWS, DIM, False", "moves"),
}


def interpreted(*args):
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernel_models.fused_script", *map(str, args)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_kernels_do_what_operators_do():
    """120 random cases in guarded memory, and whole plans with the kernels in the place of PyTorch's operators."""
    (found,) = interpreted()
    assert found["merge"] <= LIMIT
    assert found["moves"] == 0.0
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
    alive = [name for (name, (*_, kind)), errors in zip(MUTANTS.items(), found, strict=True) if errors[kind] <= LIMIT]
    assert not alive


@pytest.mark.share(4)
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("kind", ["*bf16", "*fp16", "*fp32"])
def test_kernels_become_machine_code(capability, kind, tmp_path, record_property):
    """For A100, H100 and B200, without any of them: registers and shared memory are known then."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from longspan.run import fused
    from longspan.run.triton_kernels import merge_kernel, rows_kernel, two_rows_kernel

    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    ptxas = folder / ("ptxas-blackwell" if capability >= 90 else "ptxas")
    wide = {"acc": "*fp32", "top": "*fp32", "num": "*fp32", "lse": "*fp32", "here": "*i32", "there": "*i32"}
    wide |= {"here2": "*i32", "there2": "*i32"}
    for kernel in (merge_kernel, rows_kernel, two_rows_kernel):
        sizes = fused._grid(1, 4096, 128)[1] | {"ADDS": False, "BY_ROW": True}
        constants = {name: size for name, size in sizes.items() if name in kernel.arg_names}
        tensors = dict.fromkeys(("out", "source", "target", "source2", "target2"), kind) | wide
        signature = {name: "constexpr" if name in constants else tensors.get(name, "i64") for name in kernel.arg_names}
        source = ASTSource(kernel, signature, {(kernel.arg_names.index(name),): n for name, n in constants.items()})
        compiled = triton.compile(source, GPUTarget("cuda", capability, 32), {"enable_fp_fusion": False})
        assert len(compiled.asm["cubin"]) > 0
        ptx = tmp_path / "kernel.ptx"
        ptx.write_text(compiled.asm["ptx"])
        arch = re.search(r"\.target (\w+)", compiled.asm["ptx"])[1]
        command = [str(ptxas), "-v", f"--gpu-name={arch}", str(ptx), "-o", str(tmp_path / "kernel.cubin")]
        told = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stderr
        registers = int(re.search(r"Used (\d+) registers", told)[1])
        assert "0 bytes spill stores" in told
        assert registers <= 168  # three blocks of 128 threads on a multiprocessor
        record_property(
            f"{kernel.__name__} sm_{capability} {kind}", f"{registers} registers, {compiled.metadata.shared} B"
        )
