"""Who sends what when, and which tile is computed at which step: plans as plain data."""

from longspan.schedules.cost.machine import Link, Machine, Tiling
from longspan.schedules.cost.presets import MACHINES, machine_named
from longspan.schedules.cost.simulator import Event, Timeline, simulate
from longspan.schedules.planners import PLANNERS, Scheme, scheme
from longspan.schedules.problem import Problem
from longspan.schedules.proof.validator import validate
from longspan.schedules.reversal import backward, reverse
from longspan.schedules.steps import Compute, Piece, Recall, Role, Schedule, Sizes, Step, Transfer
from longspan.schedules.text_table import table

__all__ = [
    "MACHINES",
    "PLANNERS",
    "Compute",
    "Event",
    "Link",
    "Machine",
    "Piece",
    "Problem",
    "Recall",
    "Role",
    "Schedule",
    "Scheme",
    "Sizes",
    "Step",
    "Tiling",
    "Timeline",
    "Transfer",
    "backward",
    "machine_named",
    "reverse",
    "scheme",
    "simulate",
    "table",
    "validate",
]
