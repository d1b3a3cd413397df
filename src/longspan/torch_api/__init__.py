"""PyTorch's own names for context parallelism, implemented by Longspan (see `api.py`)."""

from longspan.torch_api import api
from longspan.torch_api.api import *  # noqa: F403

__doc__ = api.__doc__
__all__: list[str] = []
__all__ += api.__all__
