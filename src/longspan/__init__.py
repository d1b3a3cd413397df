"""Exact attention over sequences too long for one device, for PyTorch.

Importing this needs numpy alone; torch is loaded by the functions that touch tensors.
"""

from longspan import layouts, masks, schedules
from longspan.api import attention, block_mask, flex_attention, plan
from longspan.errors import KernelError, LayoutError, LongspanError, MaskError, PlanError, ScheduleError
from longspan.schedules.plan import Plan
from longspan.span import Span

__version__ = "0.1.0.dev0"
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
    "flex_attention",
    "layouts",
    "masks",
    "plan",
    "schedules",
]
