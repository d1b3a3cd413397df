"""What goes with the named extras of `longspan.attention`. Importing this loads torch."""

from longspan.scoring.biases import RelativeBias, alibi_slopes

__all__ = ["RelativeBias", "alibi_slopes"]
