"""Deprecated: use `longspan.huggingface.trainer`."""

from longspan.integrations import forward_to

__getattr__ = forward_to("longspan.integrations.hf_trainer", "longspan.huggingface.trainer")
