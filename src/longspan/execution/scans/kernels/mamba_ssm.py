"""mamba_ssm: Triton kernels for Mamba-2. They take one entering state for each batch row, so that every segment is one,
and those of about the same length are computed together."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from longspan.execution.scans.contract import ScanWork, Segments
from longspan.execution.scans.kernels.chunks import ChunkTable, cut
from longspan.execution.scans.kernels.extras import PackageScan, nothing
from longspan.execution.scans.kernels.forms import passed, stepped
from longspan.execution.scans.kernels.reference import own_precision
from longspan.execution.scans.recurrences import Ssd
from longspan.span import Ints

CHUNK = 16, 256
"""Tokens of a chunk of theirs: at least, at most."""


class MambaScan(PackageScan):
    """Mamba-2."""

    name = "mamba_ssm"
    package = "mamba_ssm"
    install = "mamba_ssm"

    def why_not_this(self, work: ScanWork) -> str | None:
        if not isinstance(work.recurrence, Ssd):
            return f"it has no function for the recurrence {work.recurrence.name!r}"
        x, _, b, c = work.tokens
        dtypes = {str(y.dtype) for y in (x, b, c)}
        if len(dtypes) > 1:
            return f"it takes x, B and C of one dtype, and they are {', '.join(sorted(dtypes))}"
        return None

    def address(self, work: ScanWork) -> tuple[str, str]:  # noqa: ARG002
        return "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined"

    def run(self, work: ScanWork, states: Tensor) -> tuple[Tensor, Tensor]:
        batch, slots = work.tokens[0].shape[:2]
        groups = alike(work.segments)
        out, after = torch.zeros_like(work.tokens[0]), []
        for which, longest in groups:
            table = cut(work.segments.of(which), longest, batch, slots, states.device)
            part, left = self._rows(work, table, states[torch.as_tensor(which, device=states.device)])
            out = out + table.unfold(part.flatten(2).unsqueeze(1)).view(out.shape)  # each slot is in one of them
            after.append(left)
        place = torch.as_tensor(np.argsort(np.concatenate([which for which, _ in groups])), device=states.device)
        return out, torch.cat(after)[place]

    def _rows(self, work: ScanWork, table: ChunkTable, states: Tensor) -> tuple[Tensor, Tensor]:
        """Output (segments, longest, H, V), and the states that leave."""
        assert isinstance(work.recurrence, Ssd)
        x, dt, b, c = (table.fold(y.flatten(2).unsqueeze(2)).squeeze(1).unflatten(2, y.shape[2:]) for y in work.tokens)
        with own_precision(work):
            ended = (table.slot < 0)[:, None, None, :, None]
            by_heads = dt.float().mT[:, None, ..., None]  # one key head, as far as steps are concerned
            steps = stepped(by_heads, ended, work.recurrence, work.shared)[0][:, 0, ..., 0].mT
        a, d, _ = work.shared
        assert a is not None
        size = min(max(1 << (table.size - 1).bit_length(), CHUNK[0]), CHUNK[1])
        out, after = self.function(work)(
            x, steps.contiguous(), a.float(), b, c, size,
            D=None if d is None else d.contiguous(), initial_states=states.mT.contiguous(),
            dt_limit=(float("-inf"), float("inf")), return_final_states=True,
        )  # fmt: skip
        return out, after.mT

    def summary(self, work: ScanWork) -> tuple[Tensor, Tensor]:
        with torch.no_grad(), own_precision(work):
            return passed(work), self.local(work, nothing(work))[1]


def alike(segments: Segments) -> list[tuple[Ints, int]]:
    """Numbers of segments that are computed together, and the length of the longest: of those that are together, none
    is less than half as long, so at most half of what is computed is blank.

    >>> [(which.tolist(), n) for which, n in alike(Segments(np.array([[0, 0, 5], [0, 5, 14], [0, 14, 16]])))]
    [([1, 0], 9), ([2], 2)]
    """
    lengths = segments.table[:, 2] - segments.table[:, 1]
    order = np.argsort(-lengths, kind="stable")
    begins = [0]
    for at in range(1, len(order)):
        if 2 * lengths[order[at]] < lengths[order[begins[-1]]]:
            begins.append(at)
    return [(order[i:j], int(lengths[order[i]])) for i, j in pairwise([*begins, len(order)])]
