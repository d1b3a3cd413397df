"""Exact attention over sequences too long for one device, for PyTorch."""

from longspan import layouts, masks

__version__ = "0.1.0.dev0"
__all__ = ["layouts", "masks"]
