"""Which flash attention PyTorch runs on GPUs is part of what ranks compare."""

import pytest
import torch
from torch.nn import attention

import longspan as ls
from longspan.kernels import kernel_named
from longspan.kernels.cuda_flash import implementation
from longspan.run.group import Safety
from longspan.run.ops import create_record
from longspan.run.walk import Job


def record(device):
    layout = ls.layouts.contiguous(8, 2)
    plan = ls.plan(ls.masks.causal(), layout, q_heads=1, kv_heads=1, head_dim=8, dtype="bfloat16", scheme="ring")
    job = Job(plan, 0, kernel_named("varlen"), 1.0, torch.bfloat16)
    return create_record(job, torch.device(device), None, "", Safety())


@pytest.mark.parametrize(("device", "differs"), [("cuda:0", True), ("cpu", False)])
def test_ranks_compare_the_implementation_where_it_computes(device, differs, monkeypatch):
    before = record(device)
    monkeypatch.setattr(attention, "current_flash_attention_impl", lambda: "FA3")
    assert implementation() == "FA3"
    after = record(device)
    assert (before.digest != after.digest) == differs
    assert ("FA2" in before.device, "FA3" in after.device) == (differs, differs)


def test_older_versions_of_pytorch_have_their_own(monkeypatch):
    monkeypatch.delattr(attention, "current_flash_attention_impl")
    assert implementation() == "FA2"
