"""Exact attention over sequences too long for one device, for PyTorch.

Importing this package needs only numpy. Functions that touch tensors load torch.
"""

from collections.abc import Mapping as _Mapping
from typing import Any as _Any
from typing import cast as _cast

from longspan import layouts, masks, planning
from longspan.api import attention, block_mask, causal_conv1d, conv_plan, flex_attention, plan
from longspan.errors import (
    AgreementError,
    KernelError,
    LayoutError,
    LongspanError,
    MaskError,
    PlanError,
    ScheduleError,
)
from longspan.planning.batches import MicroBatch as _MicroBatch
from longspan.planning.batches import batches
from longspan.planning.conv_plan import ConvPlan as _ConvPlan
from longspan.planning.plan import Plan
from longspan.planning.scan_plan import ScanPlan as _ScanPlan
from longspan.recurrences import gated_delta_rule, linear_attention, linear_recurrence, scan, scan_plan, ssd
from longspan.spans import Span
from longspan.verification import verify
from longspan.versions import VERSION

__version__ = VERSION
__all__ = [
    "AgreementError",
    "KernelError",
    "LayoutError",
    "LongspanError",
    "MaskError",
    "Plan",
    "PlanError",
    "ScheduleError",
    "Span",
    "attention",
    "batches",
    "block_mask",
    "causal_conv1d",
    "conv_plan",
    "flex_attention",
    "gated_delta_rule",
    "layouts",
    "linear_attention",
    "linear_recurrence",
    "masks",
    "plan",
    "planning",
    "scan",
    "scan_plan",
    "ssd",
    "verify",
]


def _repr_html(value: masks.Mask | layouts.Layout | Plan | _ScanPlan) -> str:
    """What notebooks show. Pictures lie above masks, layouts and plans, so that this is where the two meet."""
    from longspan.viz import notebook_html

    return notebook_html(value)


def _shard(self: Plan, batch: _Mapping[str, _Any] | _Any, rank: int, **options: _Any) -> _Any:
    """The rank's part of a batch, or of one tensor, by the plan's own layout. Batches of training lie above plans too.

    >>> p = plan(masks.causal(8), layouts.zigzag(8, 2), q_heads=2, kv_heads=2, head_dim=8, dtype="float32")
    >>> import numpy as np
    >>> p.shard(np.arange(8), 0).tolist()
    [0, 1, 6, 7]
    """
    if not isinstance(batch, _Mapping):
        return self.layout.shard(batch, rank, **options)
    from longspan.training import shard_batch

    return shard_batch(batch, self, rank, **options)


def _prepare(
    self: Plan | _ConvPlan | _ScanPlan,
    rank: int,
    device: _Any = "cpu",
    *,
    kernel: str = "auto",
    backward: bool = True,
    group: _Any = None,
) -> None:
    """Do what the first call with the plan does on this rank before its messages: compute the rank's steps, record
    them, and copy their tables to the device. Sends nothing, so that a thread may do it for the next batch while a step
    runs; `longspan.training.prefetch` does.

    With a `group`, run attention on zeros over it as well, which compares the ranks' plans, connects the pairs of ranks
    that exchange messages, and compiles kernels. All ranks of the group must do so, outside of a thread.

    Pass the `kernel` that the call passes, and `backward=False` for calls without gradients. A call with other tensors
    than the plan's, or a score function, chooses its kernel itself, and then records again. A plan of a recurrence does
    not name it: "auto" prepares for the kernel of the last call with such states, or for `reference`.

    >>> p = plan(masks.causal(8), layouts.zigzag(8, 2), q_heads=2, kv_heads=2, head_dim=8, dtype="float32")
    >>> p.prepare(0)
    """
    import torch

    from longspan.mixers import convolution, scans
    from longspan.run import ops

    if rank not in range(self.layout.world_size):
        raise PlanError(
            f"rank must be 0 to {self.layout.world_size - 1}, but got {rank!r}. Pass this process's rank in the group."
        )
    where = torch.device(device)
    # The Hugging Face Trainer numbers CPUs by rank. Calls see the number of a device, also of the current one.
    where = torch.device("cpu") if where.type == "cpu" else torch.empty(0, device=where).device
    with ops.on_device(where):
        if isinstance(self, Plan):
            ops.prepare(self, int(rank), where, kernel, backward=backward)
            if group is not None:
                q, k, v = (x.requires_grad_(backward) for x in ops.zeros_for(self, int(rank), where))
                out = attention(q, k, v, self, group=group, kernel=kernel)
                if backward:
                    torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
        elif group is not None:
            raise PlanError(f"group must be None for a {type(self).__name__}, but got {group!r:.80}. Leave it out.")
        elif isinstance(self, _ScanPlan):
            scans.prepare(self, int(rank), where, kernel, backward=backward)
        elif kernel == "auto":
            convolution.prepare(self, int(rank), where, backward=backward)
        else:
            raise PlanError(f"kernel must be 'auto' for a plan of a convolution, but got {kernel!r}. Leave it out.")


def _plan_of(self: _MicroBatch, **sizes: _Any) -> Plan:
    return plan(self.mask, self.layout, **sizes)


_MicroBatch.plan = _cast(_Any, _plan_of)
Plan.prepare = _ConvPlan.prepare = _ScanPlan.prepare = _cast(_Any, _prepare)
Plan.shard = _cast(_Any, _shard)  # a method, which the declaration there writes without its plan
for _kind in (masks.Mask, layouts.Layout, Plan, _ScanPlan):
    setattr(_kind, "_repr_html_", _repr_html)  # noqa: B010 - the classes below know nothing of pictures
