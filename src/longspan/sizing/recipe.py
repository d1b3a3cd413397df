"""What a training step has switched on, and a line of what it takes."""

from __future__ import annotations

from dataclasses import dataclass

from longspan.errors import PlanError
from longspan.schedules.dtypes import ITEMSIZE


@dataclass(frozen=True, slots=True)
class MemoryLine:
    """Bytes under a name, and why they are there."""

    name: str
    size: int
    why: str


@dataclass(frozen=True, slots=True)
class Recipe:
    """What saves memory, and the dtypes.

    >>> Recipe(offload=True).words
    'checkpointing, offload'
    """

    checkpointing: bool = True
    """Every layer is computed again in backward from its input."""
    offload: bool = False
    """Those inputs wait on the host."""
    mlp_chunks: int = 1
    """MLPs run over so many runs of tokens, one after the other, each computed again in backward."""
    logits: bool = False
    """Logits of all tokens are there at once."""
    dtype: str = "bfloat16"
    """What is computed in."""
    state: str = "float32"
    """Of parameters, gradients and optimizer, as they are kept and summed."""

    def __post_init__(self) -> None:
        if self.mlp_chunks < 1:
            raise PlanError(f"{self.mlp_chunks} chunks of an MLP were asked for. One is the whole.")
        for name in (self.dtype, self.state):
            if name not in ITEMSIZE:
                raise PlanError(f"dtype {name!r:.40} was asked for. Choose one of {', '.join(ITEMSIZE)}.")
        if self.state_size < self.itemsize:
            raise PlanError(
                f"parameters kept in {self.state} were asked for, and computing in {self.dtype}. Keep them in"
                f" {self.dtype} or a wider dtype."
            )
        if self.offload and not self.checkpointing:
            raise PlanError(
                "inputs of layers are sent to the host where layers are computed again. Leave checkpointing on."
            )

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def state_size(self) -> int:
        return ITEMSIZE[self.state]

    @property
    def words(self) -> str:
        """What is switched on."""
        chunks = f"MLP in {self.mlp_chunks} chunks" if self.mlp_chunks > 1 else ""
        first = "checkpointing" if self.checkpointing else "no checkpointing"
        others = (self.offload, "offload"), (chunks, chunks), (self.logits, "whole logits")
        return ", ".join((first, *(word for on, word in others if on)))
