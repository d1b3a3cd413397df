"""`ContextParallelTrainer`, by the name under which it is documented."""

from longspan.integrations.huggingface import trainer
from longspan.integrations.huggingface.trainer import ContextParallelTrainer

__doc__ = trainer.__doc__
__all__ = ["ContextParallelTrainer"]
