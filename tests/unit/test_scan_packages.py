"""Scan kernels of other packages: their real Triton kernels by Triton's interpreter, and ours around models of them."""

import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from longspan.errors import KernelError
from longspan.mixers.scan_kernels import choose_scan_kernel, group_by_length, scan_kernel_named
from longspan.mixers.scan_reference import Segments
from tests.jobs.runner import ROOT
from tests.kernel_models.scan_packages import KERNELS, use_models
from tests.scan_cases import KINDS, errors, random_segments, random_states, random_work

NEEDS = {
    "fla": "fla-core is not installed (pip install --no-deps fla-core)",
    "mamba_ssm": "mamba_ssm is not installed (its sources on PYTHONPATH are enough)",
}


def interpreted(*args):
    paths = str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernel_models.scan_script", *args]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.mark.parametrize("package", NEEDS)
def test_published_kernels_do_what_the_reference_does(package):
    """States in and out, both forms of maps and every gradient, in float32. What the reference itself loses in float32
    is the measure; sums are in another order in their kernels."""
    pytest.importorskip("triton", reason="Triton is not installed")
    if find_spec(package) is None:
        pytest.skip(NEEDS[package])
    found = interpreted(package)
    assert len(found) == {"fla": 5, "mamba_ssm": 2}[package]
    for case in found:
        own = max(case["reference"].values())
        for form in ("local", "one pass", "summary"):
            for part, error in case.get(form, {}).items():
                assert error <= 8 * own + 2**-22, (case["case"], form, part, error)


@pytest.mark.share(3)
@pytest.mark.parametrize("kind", KERNELS)
def test_what_is_made_of_their_functions(kind, monkeypatch):
    """25 random problems around models of the functions: packing, rows, maps, one pass. The functions get some numbers
    in float32, which is what limits it."""
    use_models(monkeypatch)
    for seed in range(25):
        torch.manual_seed(seed)
        work = random_work(kind, random.Random(seed), dtype=torch.float32)
        found = errors(scan_kernel_named(KERNELS[kind]), work, random_states(work))
        assert max(found.values()) <= 1e-4, (seed, found)


def test_segments_of_about_the_same_length_are_together():
    rng = random.Random(0)
    for _ in range(50):
        segments = random_segments(rng, 3, 60)
        groups = group_by_length(segments)
        assert sorted(np.concatenate([which for which, _ in groups]).tolist()) == list(range(len(segments)))
        lengths = segments.table[:, 2] - segments.table[:, 1]
        for which, longest in groups:
            assert lengths[which].max() == longest <= 2 * lengths[which].min()


def on_gpu(kind, **asked):
    """A problem whose tensors pretend to be on a GPU."""
    work = random_work(kind, random.Random(0), dtype=asked.pop("dtype", torch.bfloat16), **asked)
    with FakeTensorMode():
        there = [
            tuple(None if x is None else torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in y)
            for y in (work.tokens, work.shared)
        ]
    return replace(work, tokens=there[0], shared=there[1])


@pytest.fixture
def installed(monkeypatch):
    """As if both packages were there."""
    use_models(monkeypatch)
    monkeypatch.setattr("longspan.mixers.scan_kernels.find_spec", lambda name: name)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("kind", KINDS)
def test_gpus_get_the_kernel_that_can(kind):
    expected = KERNELS.get(kind, "reference")
    assert choose_scan_kernel("auto", on_gpu(kind)).name == expected
    assert choose_scan_kernel(expected, on_gpu(kind)).name == expected
    assert choose_scan_kernel("reference", on_gpu(kind)).name == "reference"
    assert choose_scan_kernel("auto", on_gpu(kind, dtype=torch.float64)).name == "reference"


EMPTY = Segments(np.array([[0, 2, 2]]))
REFUSALS = [
    ("fla", "ssd", {}, "it has no function for the recurrence 'ssd'. Use 'mamba_ssm' or 'reference', or 'auto'."),
    ("mamba_ssm", "gla", {}, "it has no function for the recurrence 'linear_attention'"),
    ("fla", "gla", {"dtype": torch.float64}, "it computes in float32, and there are torch.float64. Use 'reference'"),
    ("fla", "kda", {"sizes": (1, 1, 257, 4)}, "keys of up to 256 features, and these have 257. Use 'reference'"),
    ("fla", "kda", {"segments": EMPTY, "slots": 4}, "it takes no segments without tokens"),
]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(("name", "kind", "asked", "words"), REFUSALS)
def test_refused_on_gpus(name, kind, asked, words):
    with pytest.raises(KernelError, match=f"kernel '{name}'.*({words})"):
        choose_scan_kernel(name, on_gpu(kind, **asked))


@pytest.mark.usefixtures("installed")
def test_tokens_of_several_dtypes_are_refused():
    for name, kind, words in (("fla", "kda", "q, k and v"), ("mamba_ssm", "ssd", "x, B and C")):
        work = on_gpu(kind)
        mixed = replace(work, tokens=(work.tokens[0], *(x.float() for x in work.tokens[1:])))
        with pytest.raises(KernelError, match=f"{words} .*dtype.*torch.bfloat16, torch.float32"):
            choose_scan_kernel(name, mixed)


def test_refused_on_cpus():
    work = random_work("ssd", random.Random(0))
    with pytest.raises(KernelError, match=r"GPU.*cpu.*'reference'"):
        choose_scan_kernel("mamba_ssm", work)


def test_packages_that_are_missing_or_broken(monkeypatch):
    where = "longspan.mixers.scan_kernels"
    monkeypatch.setattr(f"{where}.find_spec", lambda name: None)
    with pytest.raises(KernelError, match=r"fla .*pip install flash-linear-attention"):
        choose_scan_kernel("fla", on_gpu("kda"))
    assert choose_scan_kernel("auto", on_gpu("kda")).name == "reference"

    def broken(name):
        raise OSError("libcudart.so: no such file")

    monkeypatch.setattr(f"{where}.find_spec", lambda name: name)
    monkeypatch.setattr(f"{where}.importlib.import_module", broken)
    with pytest.raises(KernelError, match=r"fla.ops.kda.chunk_kda .*libcudart.so"):
        choose_scan_kernel("fla", on_gpu("kda"))
