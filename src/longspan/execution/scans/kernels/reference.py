"""Plain tensor maths in chunks: any device, any dtype, gradients by autograd. Half precision is computed in float32."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor

from longspan.execution.scans.contract import ScanKernel, ScanWork, Segments
from longspan.execution.scans.kernels.forms import VALUES, in_chunks, in_slots, stages_of_segments
from longspan.span import Ints


class ReferenceScan(ScanKernel):
    """All recurrences of `recurrences`."""

    name = "reference"

    def why_not(self, work: ScanWork) -> str | None:
        known = type(work.recurrence) in VALUES
        return None if known else f"it does not know the recurrence {work.recurrence.name!r}"

    def local(self, work: ScanWork, states: Tensor) -> tuple[Tensor, Tensor]:
        """A NaN or infinite token of a chunk reaches all of the chunk, so tokens before it are computed apart from it.

        Only outputs are looked at, and only on CPUs: a GPU would have to wait for the answer.
        """
        with own_precision(work):
            out, after = _computed(work, states)
            if out.is_cpu and not out.detach().sum(dtype=after.dtype).isfinite():
                stages = stages_of_segments(work)
                if len(stages) > 1:
                    return _computed_in_stages(work, states, stages)
            return out, after

    def summary(self, work: ScanWork) -> tuple[Tensor, Tensor]:
        with torch.no_grad(), own_precision(work):
            return in_chunks(work, reads=False).summary()


def _computed(work: ScanWork, states: Tensor) -> tuple[Tensor, Tensor]:
    chunked = in_chunks(work)
    out, after = chunked.local(states)
    return in_slots(out, chunked.table, work), after


def _computed_in_stages(work: ScanWork, states: Tensor, stages: list[Ints]) -> tuple[Tensor, Tensor]:
    """As `_computed`: the parts of a segment one after the other, the first parts of all segments together."""
    out: Tensor | None = None
    for stage in stages:
        which = torch.as_tensor(stage[:, 0])
        part, after = _computed(replace(work, segments=Segments(stage[:, 1:])), states[which])
        out = part if out is None else out + part  # zeros but for their own slots
        states = states.index_copy(0, which, after)
    assert out is not None
    return out, states


def own_precision(work: ScanWork) -> AbstractContextManager[object]:
    """Autocast would multiply in half precision what is widened here."""
    return torch.autocast(work.tokens[0].device.type, enabled=False)
