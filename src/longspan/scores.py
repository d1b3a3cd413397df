"""Public names for score functions: `alibi_slopes` and `RelativeBias`. Importing this file loads torch."""

from longspan.scoring.biases import RelativeBias, alibi_slopes

__all__ = ["RelativeBias", "alibi_slopes"]
