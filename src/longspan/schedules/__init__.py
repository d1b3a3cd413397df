"""Who sends what when, and which tile is computed at which step: plans as plain data."""

from longspan.schedules.backward import backward, reverse
from longspan.schedules.planners import PLANNERS, planner, schedule
from longspan.schedules.problem import Problem
from longspan.schedules.steps import Compute, Piece, Recall, Role, Schedule, Sizes, Step, Transfer
from longspan.schedules.table import table
from longspan.schedules.validate import validate

__all__ = [
    "PLANNERS",
    "Compute",
    "Piece",
    "Problem",
    "Recall",
    "Role",
    "Schedule",
    "Sizes",
    "Step",
    "Transfer",
    "backward",
    "planner",
    "reverse",
    "schedule",
    "table",
    "validate",
]
