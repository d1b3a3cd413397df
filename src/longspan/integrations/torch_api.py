"""PyTorch's words for context parallelism, with Longspan underneath (see `pytorch/api.py`)."""

from longspan.integrations.pytorch import api
from longspan.integrations.pytorch.api import *  # noqa: F403

__doc__ = api.__doc__
__all__: list[str] = []
__all__ += api.__all__
