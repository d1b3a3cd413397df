"""Whether a model computes over ranks what it computes on one device: a tiny copy of it is tried, both ways."""

from longspan.integrations.huggingface.proving.forms import Form
from longspan.integrations.huggingface.proving.proof import Proof, prove

__all__ = ["Form", "Proof", "prove"]
