"""Plain tensor maths in chunks: any device, any dtype, gradients by autograd. Half precision is computed in float32."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from longspan.execution.scans.contract import ScanKernel, ScanWork
from longspan.execution.scans.kernels.forms import VALUES, in_chunks, in_slots, readers, values_of


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

    def alone(self, work: ScanWork) -> tuple[Tensor, Tensor, Tensor]:
        with own_precision(work):
            chunked = in_chunks(work)
            out, after = chunked.local(chunked.zeros())
            return in_slots(out, chunked.table, work), chunked.passed(), after

    def entering(self, work: ScanWork, states: Tensor) -> Tensor:
        return added_by(states, work)


def added_by(states: Tensor, work: ScanWork) -> Tensor:
    """What entering states add to the output, for diagonal maps: a product of two matrices for every chunk."""
    if not len(work.segments):
        return torch.zeros_like(values_of(work))
    with own_precision(work):
        chunked = readers(work)
        return in_slots(chunked.entering(states), chunked.table, work)


def own_precision(work: ScanWork) -> AbstractContextManager[object]:
    """Autocast would multiply in half precision what is widened here."""
    return torch.autocast(work.tokens[0].device.type, enabled=False)
