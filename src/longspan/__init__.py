"""Exact attention over sequences too long for one device, for PyTorch.

Importing this needs numpy alone; torch is loaded by the functions that touch tensors.
"""

from longspan import layouts, masks, schedules
from longspan.api import attention, block_mask, causal_conv1d, conv_plan, flex_attention, plan
from longspan.errors import KernelError, LayoutError, LongspanError, MaskError, PlanError, ScheduleError
from longspan.recurrences import gated_delta_rule, linear_attention, linear_recurrence, scan, scan_plan, ssd
from longspan.schedules.plan import Plan
from longspan.schedules.scans.plan import ScanPlan as _ScanPlan
from longspan.span import Span
from longspan.verification import verify
from longspan.version import VERSION

__version__ = VERSION
__all__ = [
    "KernelError",
    "LayoutError",
    "LongspanError",
    "MaskError",
    "Plan",
    "PlanError",
    "ScheduleError",
    "Span",
    "attention",
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
    "scan",
    "scan_plan",
    "schedules",
    "ssd",
    "verify",
]


def _repr_html(value: masks.Mask | layouts.Layout | Plan | _ScanPlan) -> str:
    """What notebooks show. Pictures lie above masks, layouts and plans, so that this is where the two meet."""
    from longspan.viz import notebook_html

    return notebook_html(value)


for _kind in (masks.Mask, layouts.Layout, Plan, _ScanPlan):
    setattr(_kind, "_repr_html_", _repr_html)  # noqa: B010 - the classes below know nothing of pictures
