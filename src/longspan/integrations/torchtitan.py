"""Deprecated: use `longspan.torchtitan`."""

from longspan.integrations import forward_to

__getattr__ = forward_to("longspan.integrations.torchtitan", "longspan.torchtitan")
