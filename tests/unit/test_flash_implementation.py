"""The kernel, and which flash attention PyTorch runs on GPUs, are part of what ranks compare."""

import pytest
import torch
from torch.nn import attention

import longspan as ls
from longspan.errors import AgreementError
from longspan.kernels import kernel_named
from longspan.kernels.cuda_flash import implementation
from longspan.run.agreement import compare
from longspan.run.ops import create_record
from longspan.run.walk import Job


def record(device, kernel="varlen"):
    layout = ls.layouts.contiguous(8, 2)
    plan = ls.plan(ls.masks.causal(), layout, q_heads=1, kv_heads=1, head_dim=8, dtype="bfloat16", scheme="ring")
    job = Job(plan, 0, kernel_named(kernel), 1.0, torch.bfloat16)
    return create_record(job, torch.device(device), None, "")


@pytest.mark.parametrize(("kernel", "differs"), [("varlen", True), ("flash", True), ("efficient", False)])
def test_ranks_compare_the_implementation_where_it_computes(kernel, differs, monkeypatch):
    before = record("cuda:0", kernel)
    monkeypatch.setattr(attention, "current_flash_attention_impl", lambda: "FA3")
    assert implementation() == "FA3"
    after = record("cuda:0", kernel)
    assert (before.digest != after.digest) == differs
    assert ("FA2" in before.kernel, "FA3" in after.kernel) == (differs, differs)


def test_ranks_with_different_kernels_are_told_which():
    rows = [record("cuda:0", name).row() for name in ("fa3", "varlen", "fa3", "fa3")]
    with pytest.raises(AgreementError, match=r"kernel: fa3 on ranks 0, 2, 3, varlen \(FA2\) on rank 1.*`kernel`"):
        compare(rows)
    compare([rows[0], rows[2]])
    with pytest.raises(AgreementError, match=r"device: .*; kernel: "):  # beside another difference, in the same list
        compare([rows[0], record("cpu", "cpu_flash").row()])


def test_older_versions_of_pytorch_have_their_own(monkeypatch):
    monkeypatch.delattr(attention, "current_flash_attention_impl")
    assert implementation() == "FA2"
