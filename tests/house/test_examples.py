"""Every example runs as written, on two Gloo ranks, and agrees with one process."""

import ast
import re
from pathlib import Path

import pytest

from tests.jobs.runner import torchrun

ROOT = Path(__file__).parents[2]


@pytest.mark.share(5)
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["learned_bias", "windows", "migration", "hf_trainer", "hybrid"])
def test_example(name, tmp_path):
    if name in ("hf_trainer", "hybrid"):
        pytest.importorskip("transformers")
    path = ROOT / "examples" / f"{name}.py"
    assert len(path.read_text().splitlines()) <= 64
    agrees(path, tmp_path)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["draft_model", "block_diffusion"])
def test_joint_sequence(name, tmp_path):
    """Losses with custom masks in float64: loss and gradients of every parameter, and equal work."""
    path = ROOT / "examples" / f"{name}.py"
    assert len(path.read_text().splitlines()) <= 64
    out = agrees(path, tmp_path, 1e-10)
    assert max(float(found) for found in re.findall(r"imbalance (\d\.\d+)", out)) <= 1.05


@pytest.mark.share(5)
@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", ["accelerate_loop", "fsdp2_bias", "trl_grpo", "trl_sft", "verl_style"])
def test_program(name, tmp_path):
    """Complete programs, which say how they are launched on two processes and on eight GPUs."""
    needed = "trl" if name.startswith("trl") else "accelerate" if name == "accelerate_loop" else "transformers"
    if name != "fsdp2_bias":
        pytest.importorskip(needed)
    path = ROOT / "examples" / "trainers" / f"{name}.py"
    assert len(path.read_text().splitlines()) <= 100
    said = ast.get_docstring(ast.parse(path.read_text()))
    for ranks in (2, 8):
        assert f"torchrun --nproc-per-node {ranks} examples/trainers/{name}.py" in said
    agrees(path, tmp_path)


def test_all_programs_are_run():
    names = {path.stem for path in (ROOT / "examples" / "trainers").glob("*.py")}
    assert names == {"accelerate_loop", "fsdp2_bias", "trl_grpo", "trl_sft", "verl_style"}


def agrees(path, tmp_path, most=1e-5):
    """Runs the file by torchrun and returns its output; both ranks say how far they are off one process."""
    done = torchrun(["--nproc-per-node", "2", str(path)], tmp_path, timeout=200)
    assert done.status == 0, done.report()
    errors = [float(found) for found in re.findall(r"one process (\d\.\de[+-]\d+)", done.out)]
    assert len(errors) == 2, done.out
    assert max(errors) < most
    return done.out
