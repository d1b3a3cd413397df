"""The planners: pure functions from a problem and a rank to that rank's steps. A new one is a file and a line in
`registry.py`."""

from longspan.schedules.planners.registry import PLANNERS, VOLUMES, Planner, Scheme, scheme

__all__ = ["PLANNERS", "VOLUMES", "Planner", "Scheme", "scheme"]
