"""The convolution itself, in plain PyTorch: rows with their halos go in, a rank's own rows come out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from longspan.schedules.convolution import ConvPlan, Haloed

BY_IMAGE = (torch.float32, torch.bfloat16)
"""What PyTorch's convolution of images takes with channels last on CPUs: four times quicker than `conv1d`, which copies
rows so that tokens are last, and back."""
MANY = 32
"""Segments that are convolved as one, and whose rows are then taken by their numbers. Fewer are convolved one by one,
which leaves nothing to drop."""
_known: WeakKeyDictionary[ConvPlan, dict[tuple[int, torch.device], OwnRows]] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class OwnRows:
    """Which of the convolved rows are the rank's own.

    Row i of what comes out belongs to row i + width - 1 of what went in, so that rows in front of a segment are
    nobody's. Segments of one length are convolved as so many batch rows, and a few others one by one: then nothing has
    to be dropped.
    """

    fold: int
    """Rows of a segment with its halo where all have as many; 0 where not."""
    batches: list[int]
    """How many batch rows have the same documents."""
    rows: list[list[int] | Tensor]
    """For each of them the rows of every segment with its halo, or, of many segments, the numbers of own rows."""
    num_padding: int

    @staticmethod
    def of(plan: ConvPlan, rank: int, device: torch.device) -> OwnRows:
        """Those of a rank, remembered: a plan is used many times."""
        known = _known.setdefault(plan, {})
        if (rank, device) not in known:
            parts = plan.haloed(rank)
            rows = [_rows(part, plan.width, plan.num_rows(rank), device) for part in parts]
            batches, padding = [len(part.batch) for part in parts], plan.layout.num_padding(rank)
            known[rank, device] = OwnRows(_fold(parts, plan.width), batches, rows, padding)
        return known[rank, device]

    def convolved(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Own rows in local order, convolved; padding is zeros."""
        batch, num_rows, channels = rows.shape
        if self.fold:
            taken = depthwise(rows.view(batch * (num_rows // self.fold), self.fold, channels), weight, bias)
            taken = taken.reshape(batch, -1, channels)
        else:
            parts = rows.split(self.batches) if len(self.batches) > 1 else (rows,)
            own = [_own(part, which, weight, bias) for part, which in zip(parts, self.rows, strict=True)]
            taken = own[0] if len(own) == 1 else torch.cat(own)
        return functional.pad(taken, (0, 0, 0, self.num_padding)) if self.num_padding else taken


def _fold(parts: Sequence[Haloed], width: int) -> int:
    sizes = np.concatenate([part.table[:, 1] - part.table[:, 0] for part in parts])
    counts = {len(part.table) for part in parts}
    alike = len(sizes) and len(counts) == 1 and (sizes == sizes[0]).all()
    return int(sizes[0]) + width - 1 if alike else 0


def _rows(part: Haloed, width: int, num_rows: int, device: torch.device) -> list[int] | Tensor:
    sizes = part.table[:, 1] - part.table[:, 0]
    if len(sizes) > MANY:
        return torch.from_numpy(part.places() - (width - 1)).to(device)
    each = [own + width - 1 for own in sizes.tolist()]
    return [*each, num_rows - sum(each)]  # the last is what other batch rows have more


def _own(rows: Tensor, which: list[int] | Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not isinstance(which, list):
        return depthwise(rows, weight, bias).index_select(1, which)
    if len(which) == 1:  # no segment at all: nothing is own, but all depends on everything, as on other ranks
        return depthwise(rows, weight, bias)[:, :0]
    return torch.cat([depthwise(part, weight, bias) for part in rows.split(which, 1)[:-1]], 1)


def convolved(rows: Tensor, weight: Tensor, bias: Tensor | None, own: OwnRows, activation: str | None) -> Tensor:
    """The rank's output: its rows with their halos convolved channel by channel, rows that are not its own dropped."""
    found = own.convolved(rows, weight, bias)
    return found if activation is None else functional.silu(found)


def depthwise(rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """(batch, rows, channels) convolved along rows, each channel with its own weights: width - 1 rows fewer.

    >>> rows, weight = torch.tensor([[[1.0], [2.0], [4.0]]]), torch.tensor([[10.0, 1.0]])
    >>> depthwise(rows, weight, None).flatten().tolist()
    [12.0, 24.0]
    """
    channels = len(weight)
    if rows.device.type == "cpu" and rows.dtype in BY_IMAGE:
        image = rows.unsqueeze(2).permute(0, 3, 1, 2)  # one pixel wide, and channels last as they lie
        return functional.conv2d(image, weight[:, None, :, None], bias, groups=channels).squeeze(3).mT
    return functional.conv1d(rows.mT, weight.unsqueeze(1), bias, groups=channels).mT
