"""Where tests of this folder run: the ranks, the sizes that suit their device, and what a test recorded."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from longspan import layouts, masks
from longspan.api import plan
from longspan.cli.launch import JobRanks
from longspan.cli.workload import drawn_lengths
from longspan.planning.machine import Machine
from longspan.planning.plan import Plan
from longspan.planning.steps import Sizes

GROUP_TIMEOUT = timedelta(seconds=120)
"""A rank that fails leaves the others in a collective for this long; then they fail, too, and the next test begins."""


def tokens_of(size: str) -> int:
    """
    >>> tokens_of("64k"), tokens_of("1M")
    (65536, 1048576)
    """
    return int(size[:-1]) << {"k": 10, "M": 20}[size[-1]]


class Site:
    """The fixture `site`: the ranks, and how much to run on them."""

    def __init__(self, ranks: JobRanks, *, quick: bool, one_gpu: bool = False) -> None:
        self.ranks, self.quick, self.one_gpu = ranks, quick, one_gpu
        self.machine: Machine | None = None
        """Set by calibration; only that of rank 0 is fitted to whole attention calls."""
        self.found: dict[str, Any] = {}
        """What the running test recorded: a sentence as `found`, and numbers."""
        self._groups: list[dist.ProcessGroup] = []

    @property
    def is_gpu(self) -> bool:
        return self.ranks.device != "cpu"

    @property
    def on_one_card(self) -> bool:
        """Whether all ranks share one GPU: over Gloo, in 15 GiB of memory."""
        return self.one_gpu and self.is_gpu

    @property
    def half(self) -> torch.dtype:
        """The half type that this device computes in: GPUs before 8.0 have no bfloat16."""
        lacks = self.is_gpu and torch.cuda.get_device_capability(self.ranks.device) < (8, 0)
        return torch.float16 if lacks else torch.bfloat16

    @property
    def sizes(self) -> Sizes:
        """Sizes of the tensors of two bytes that times and memory are measured with."""
        return Sizes(32, 8, 128, 128, 2) if self.is_gpu else Sizes(8, 4, 64, 64, 2)

    @staticmethod
    def tokens(size: str) -> int:
        return tokens_of(size)

    def record(self, text: str, **figures: Any) -> None:
        """Keep a sentence and numbers for the report of the running test."""
        self.found = {"found": text, **figures}

    def compare(self, times: float, limit: float, text: str, **figures: Any) -> None:
        """Record a time as a multiple of its prediction; fail above the limit."""
        self.record(f"{text}; {times:.2f} times the prediction", times=times, **figures)
        if times > limit:
            pytest.fail(f"{text}: {times:.2f} times the prediction, and allowed are {limit:.2f}", pytrace=False)

    def plan(self, mask_name: str, size: str, scheme: str = "exchange") -> Plan:
        """Return the plan of a workload. It does not depend on this rank's machine, since the scheme is named."""
        tokens, s = self.tokens(size), self.sizes
        if mask_name == "documents":
            mask = masks.documents(drawn_lengths("longtail", tokens).tolist()) & masks.causal()
        elif mask_name == "window":
            mask = masks.causal(tokens) & masks.sliding_window(tokens // 8)
        else:
            mask = {"full": masks.full, "causal": masks.causal}[mask_name](tokens)
        return plan(
            mask, layouts.balanced(mask, world_size=self.ranks.size, seq_len=tokens), q_heads=s.q_heads,
            kv_heads=s.kv_heads, head_dim=s.head_dim, dtype=self.half, scheme=scheme,
        )  # fmt: skip

    def group(self, backend: str | None = None) -> dist.ProcessGroup:
        """Return a new group of all ranks for one test, so that a broken connection does not outlive the test."""
        group = dist.new_group(backend=backend or self.ranks.backend, timeout=GROUP_TIMEOUT)
        assert isinstance(group, dist.ProcessGroup)
        self._groups.append(group)
        return group

    def part_of(self, members: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """Return this rank's group among new groups of some ranks each."""
        groups = [dist.new_group(list(ranks), timeout=GROUP_TIMEOUT, backend=self.ranks.backend) for ranks in members]
        mine = next(group for group, ranks in zip(groups, members, strict=True) if self.ranks.rank in ranks)
        assert isinstance(mine, dist.ProcessGroup)
        self._groups.append(mine)
        return mine

    @property
    def num_groups(self) -> int:
        """Groups that this process has created so far, by which PyTorch names the next one."""
        return distributed_c10d._world.group_count

    def close_groups(self, num_groups: int) -> None:
        """End the groups of a test. `num_groups` is that of the rank with most: a rank that raised before it created
        one would give the groups of later tests other names than the other ranks, and wait for them in vain."""
        for group in self._groups:
            dist.destroy_process_group(group)
        self._groups.clear()
        distributed_c10d._world.group_count = num_groups

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, of which there must be some."""
        rows = self.ranks.gather(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        return [row.numpy().tobytes() for row in rows]
