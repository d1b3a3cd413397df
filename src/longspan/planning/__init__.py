"""Plans as plain data: which rank sends what in which step, and what it computes. No torch."""

from longspan.planning.backward_plan import backward, reverse
from longspan.planning.kernel_memory import set_table_limit, table_limit
from longspan.planning.machine import MACHINES, Link, Machine, Tiling, machine_named
from longspan.planning.planners import PLANNERS, Scheme, scheme
from longspan.planning.problem import Problem
from longspan.planning.simulator import Event, Timeline, simulate
from longspan.planning.steps import Compute, Piece, Recall, Role, Schedule, Sizes, Step, Transfer, table
from longspan.planning.validator import validate

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
    "set_table_limit",
    "simulate",
    "table",
    "table_limit",
    "validate",
]
