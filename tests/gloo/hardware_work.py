"""What ranks find out about devices and hosts, on CPUs that name other devices."""

import logging

import pytest
import torch
import torch.distributed as dist

import longspan as ls
from longspan.run import group as groups
from longspan.run import hardware

SIZES = {"q_heads": 8, "kv_heads": 2, "head_dim": 64, "dtype": "bfloat16"}


class _Notes(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def _patched(patch, hosts, gpus, kernels):
    rank = dist.get_rank()
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.cuda, "get_device_name", lambda device=None: gpus[rank])
    patch.setattr(hardware, "backends_of", lambda config: {"cuda": "nccl"})
    patch.setattr(hardware, "_host", lambda: hosts[rank])
    patch.setattr(hardware, "implementation", lambda: kernels[rank])


def machines(hosts, gpus, kernels, by_store=False):
    """(name, node, assumed, fingerprint) of two plans over a new group, and the notes."""
    group, notes, plans, calls, gather = dist.new_group(), _Notes(), [], [], groups.Members.gather
    logger = logging.getLogger("longspan")
    logger.addHandler(notes)
    layout = ls.layouts.zigzag(1024, dist.get_world_size())
    window = ls.masks.from_mask_mod(lambda b, h, q, k: q >= k)
    try:
        with pytest.MonkeyPatch.context() as patch:
            _patched(patch, hosts, gpus, kernels)
            patch.setattr(groups.Members, "gather", lambda *words: calls.append(1) or gather(*words))
            if by_store:
                patch.setattr(groups, "message_device", lambda group, wanted=None: torch.device("cuda", 0))
            for mask in (ls.masks.causal(), window, ls.masks.documents([500, 524])):
                plans.append(ls.plan(mask, layout, **SIZES, group=group))
    finally:
        logger.removeHandler(notes)
    dist.destroy_process_group(group)
    seen = [(p.machine.name, p.machine.node, p.machine_assumed) for p in plans]
    return seen, [p.fingerprint for p in (plans[0], plans[2])], len(calls), notes.texts


def on_cpus():
    """Machines of plans with and without the group of all ranks, and whether ranks exchanged anything."""
    group = dist.new_group()
    layout = ls.layouts.zigzag(1024, dist.get_world_size())
    plans = [ls.plan(ls.masks.causal(), layout, **SIZES, group=which) for which in (None, group)]
    exchanged = bool(groups.members_of(group).machines)
    dist.destroy_process_group(group)
    return plans[0] is plans[1], plans[1].machine.name, plans[1].machine_assumed, exchanged
