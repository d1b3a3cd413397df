"""flash-linear-attention: Triton kernels of delta rules and linear attention. Segments are its `cu_seqlens`."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from longspan.execution.scans.contract import ScanWork
from longspan.execution.scans.kernels.chunks import packing
from longspan.execution.scans.kernels.extras import PackageScan, nothing
from longspan.execution.scans.kernels.forms import passed, values_of
from longspan.execution.scans.kernels.reference import own_precision
from longspan.execution.scans.recurrences import GatedDelta, LinearAttention

MOST_KEYS = 256
"""Features of keys that the kernels of delta rules take."""


class FlaScan(PackageScan):
    """Delta rules and linear attention, each with one decay for a head or one for each row of its state."""

    name = "fla"
    package = "fla"
    install = "flash-linear-attention"

    def why_not_this(self, work: ScanWork) -> str | None:
        if not isinstance(work.recurrence, GatedDelta | LinearAttention):
            return f"it has no function for the recurrence {work.recurrence.name!r}"
        dtypes = {str(x.dtype) for x in work.tokens[:3]}
        if len(dtypes) > 1:
            return f"it takes q, k and v of one dtype, and they are {', '.join(sorted(dtypes))}"
        features = work.tokens[1].shape[3]
        if isinstance(work.recurrence, GatedDelta) and features > MOST_KEYS:
            return f"it takes keys of up to {MOST_KEYS} features, and these have {features}"
        return None

    def address(self, work: ScanWork) -> tuple[str, str]:
        by_rows = work.tokens[3].ndim == 4
        if isinstance(work.recurrence, GatedDelta):
            found = ("kda", "chunk_kda") if by_rows else ("gated_delta_rule", "chunk_gated_delta_rule")
        else:
            found = ("gla", "chunk_gla") if by_rows else ("simple_gla", "chunk_simple_gla")
        return f"fla.ops.{found[0]}", found[1]

    def run(self, work: ScanWork, states: Tensor) -> tuple[Tensor, Tensor]:
        recurrence, values = work.recurrence, values_of(work)
        assert isinstance(recurrence, GatedDelta | LinearAttention)
        batch, slots = values.shape[:2]
        packed = packing(work.segments, batch, slots, values.device)
        q, k, v, g, *beta = map(packed.pack, work.tokens)
        options = {"scale": recurrence.scale}
        if isinstance(recurrence, GatedDelta):
            options["use_qk_l2norm_in_kernel"] = recurrence.l2norm
        else:  # only delta rules share keys between heads
            q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
        out, after = self.function(work)(
            q, k, v, g.float(), *beta,
            initial_state=states.contiguous(), output_final_state=True, cu_seqlens=packed.edges, **options,
        )  # fmt: skip
        return packed.unpack(out, values.shape), after

    def summary(self, work: ScanWork) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            start = nothing(work)
            if isinstance(work.recurrence, LinearAttention):
                with own_precision(work):
                    return passed(work), self.local(work, start)[1]
            q, k, v, *rest = work.tokens
            features = k.shape[3], v.shape[3]
            one = torch.eye(features[0], device=v.device).expand(*start.shape[:2], -1, -1)
            wide = torch.nn.functional.pad(v, (0, features[0]))  # values [v | 0] and states [0 | I] give [U | M]
            both = replace(work, tokens=(q, k, wide, *rest))
            u, m = self.local(both, torch.cat((start, one), -1))[1].split(features[::-1], -1)
            return m, u
