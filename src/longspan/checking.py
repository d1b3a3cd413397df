"""Deprecated: use `longspan.verification`."""

from longspan.integrations import forward_to

__getattr__ = forward_to("longspan.checking", "longspan.verification")
