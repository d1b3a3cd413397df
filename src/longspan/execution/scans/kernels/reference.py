"""Plain tensor maths in chunks: any device, any dtype, gradients by autograd. Half precision is computed in float32."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from longspan.execution.scans.contract import ScanKernel, ScanWork
from longspan.execution.scans.kernels.forms import VALUES, in_chunks, in_slots


class ReferenceScan(ScanKernel):
    """All recurrences of `recurrences`."""

    name = "reference"

    def why_not(self, work: ScanWork) -> str | None:
        known = type(work.recurrence) in VALUES
        return None if known else f"it does not know the recurrence {work.recurrence.name!r}"

    def local(self, work: ScanWork, states: Tensor) -> tuple[Tensor, Tensor]:
        with own_precision(work):
            chunked = in_chunks(work)
            out, after = chunked.local(states)
            return in_slots(out, chunked.table, work), after

    def summary(self, work: ScanWork) -> tuple[Tensor, Tensor]:
        with torch.no_grad(), own_precision(work):
            return in_chunks(work, reads=False).summary()


def own_precision(work: ScanWork) -> AbstractContextManager[object]:
    """Autocast would multiply in half precision what is widened here."""
    return torch.autocast(work.tokens[0].device.type, enabled=False)
