"""`split_sequences`, by the name under which it is documented."""

from longspan.integrations.huggingface import accelerate
from longspan.integrations.huggingface.accelerate import split_sequences

__doc__ = accelerate.__doc__
__all__ = ["split_sequences"]
