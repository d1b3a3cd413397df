"""Deprecated: use `longspan.huggingface.accelerate`."""

from longspan.integrations import forward_to

__getattr__ = forward_to("longspan.integrations.hf_accelerate", "longspan.huggingface.accelerate")
