"""Deprecated: use `longspan.huggingface`."""

from longspan.integrations import forward_to

__getattr__ = forward_to("longspan.integrations.huggingface", "longspan.huggingface")
