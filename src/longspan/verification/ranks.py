"""All ranks of a layout as one object: shard, gather and reduce tensors of known shapes.

Ranks exchange a row of integers first, so that no rank waits for a tensor that another rank does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan.errors import PlanError
from longspan.layouts import Layout
from longspan.training import BatchError, check_same, gather_outputs
from longspan.training.groups import message_device, process_group
from longspan.verification.report import Finding

SEQ_DIM = 2


@dataclass(frozen=True)
class RankView:
    """All ranks of a layout: one per process of a group, or all of them in this process (no group)."""

    layout: Layout
    group: dist.ProcessGroup | None

    @staticmethod
    def of(layout: Layout, group: Any) -> RankView:
        members = None if group is None else process_group(group, "verify", real=True)
        if members is not None and members.size() != layout.world_size:
            raise PlanError(
                f"verify got {layout} and a group of {members.size()} ranks. Plan for the group that holds the"
                f" sequence, or pass that group."
            )
        return RankView(layout, members)

    @property
    def size(self) -> int:
        return self.layout.world_size

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    def shard(self, x: Tensor, dim: int = SEQ_DIM) -> Tensor:
        """Return this rank's part; without a group, all of it."""
        return x if self.group is None else self.layout.shard(x, self.rank, dim)

    def num_slots(self, rank: int) -> int:
        """Return the number of tokens of a rank's tensor, padding included."""
        return self.layout.seq_len if self.group is None else self.layout.num_slots(rank)

    def unshard(self, x: Tensor, dim: int = SEQ_DIM) -> Tensor:
        """Return the whole tensor, in global order, on every rank."""
        x = x.detach()
        if self.group is None:
            return x
        whole = gather_outputs(x.to(message_device(self.group)), self.layout, self.group, dim)
        assert whole is not None
        return whole.to(x.device)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """Return every rank's tensor; all have one shape."""
        if self.group is None:
            return [x.detach()]
        local = x.detach().contiguous().to(message_device(self.group))
        parts = [torch.empty_like(local) for _ in range(self.group.size())]
        dist.all_gather(parts, local, group=self.group)
        return [part.to(x.device) for part in parts]

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks."""
        if self.group is None:
            return x.detach()
        total = x.detach().clone().contiguous().to(message_device(self.group))
        dist.all_reduce(total, group=self.group)
        return total.to(x.device)

    def gather_integers(self, row: Sequence[int]) -> list[list[int]]:
        """Return every rank's row of integers."""
        return [part.tolist() for part in self.all_gather(torch.tensor(row, dtype=torch.int64))]

    def where(self, flag: bool) -> list[int]:
        """Return the ranks on which the flag is set."""
        return [rank for rank, (is_set,) in enumerate(self.gather_integers([int(flag)])) if is_set]

    def missing(self, grads: dict[str, Tensor | None]) -> dict[str, tuple[int, ...]]:
        """Return the names of gradients that are None anywhere, and on which ranks."""
        rows = self.gather_integers([int(grad is None) for grad in grads.values()])
        ranks = {name: tuple(r for r, row in enumerate(rows) if row[i]) for i, name in enumerate(grads)}
        return {name: where for name, where in ranks.items() if where}


def find_different_data(values: dict[str, Any], ranks: RankView) -> Finding | None:
    """Return a finding if ranks have different data."""
    if ranks.group is None:
        return None
    try:
        check_same(values, ranks.group)
    except BatchError as error:
        return Finding(
            "the input", "is not the same on all ranks", torch.inf, 0.0, (), (), None,
            "ranks fed different data", str(error)[:1].upper() + str(error)[1:],
        )  # fmt: skip
    return None


def with_failures_elsewhere(findings: list[Finding], ranks: RankView) -> tuple[Finding, ...]:
    """Add a finding on a rank without any if other ranks have some, so that the verdict is the same on all."""
    others = ranks.where(bool(findings))
    if not others or findings:
        return tuple(findings)
    return (
        Finding(
            "the comparison", "failed on other ranks", torch.inf, 0.0, tuple(others), (), None,
            "machines compute differently", "Ranks compare the same gathered numbers, and only some of them differ.",
        ),
    )  # fmt: skip
