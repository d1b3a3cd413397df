"""Deprecated: use `longspan.torch_api`."""

from longspan.integrations import forward_to

__getattr__ = forward_to("longspan.integrations.torch_api", "longspan.torch_api")
