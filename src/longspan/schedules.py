"""Deprecated: use `longspan.planning`."""

from longspan.integrations import forward_to

__getattr__ = forward_to("longspan.schedules", "longspan.planning")
