"""How a model wants to be treated over ranks, as its proof has found out: plain values, which are remembered."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

COUNT, AFTER_PADDING, REAL, NO_POSITIONS = "count", "after padding", "real tokens", "none"
OWN, SHIFTED, IN_PLACE, POOLED, NO_LOSS = "own", "shifted", "in place", "pooled", "none"
KEYWORDS, MASK = "keywords", "mask"


@dataclass(frozen=True)
class Rules:
    """What differs from model to model."""

    positions: str = COUNT
    """Where a batch has no position_ids: tokens are counted from 0 ("count"), from padding_idx + 1 without padding
    ("after padding", RoBERTa), from 0 without padding, which is at -1 ("real tokens", OPT), or the model takes none
    ("none")."""
    loss: str = OWN
    """The model's own loss takes shift_labels ("own"); cross-entropy of labels one place earlier ("shifted") or in
    place ("in place"), divided by all labels; a loss of whole sequences, the same on all ranks ("pooled"); or none."""
    handed: str = KEYWORDS
    """Whether layers get to know of other ranks by the keyword `longspan`, or by their mask alone."""
    body: str | None = None
    """The module at whose door whole tensors are cut, by name; None where they are cut before the model."""
    joined: str | None = None
    """The module behind which tokens of all ranks are put together again, by name; None where they stay apart."""
    cuts: tuple[tuple[str, int, int], ...] = ()
    """(argument of the body, its number of dims, the dim of tokens)."""
    head: str | None = None
    """The head whose logits need not be computed, by name; None where they are, and `head_reason` says why."""
    head_reason: str = ""
    scale: str = ""
    soft_cap: str = ""
    """What logits are multiplied by ("logit_scale", or "1 / logits_scaling") and capped at, by names of the
    configuration's values; "" where they are not."""
    obeys_count: bool = True
    """Whether the model's loss on one device is divided by `num_items_in_batch` where the batch has it."""
    exact_at_padding: bool = True
    """Whether the model computes at padding what it computes there on one device, so that labels there are exact."""
    layers: str = "all"
    """Whether all layers of the configuration have attention, "some" of them, or "none"."""

    def as_json(self) -> dict[str, Any]:
        """What `Rules.of_json` takes."""
        return {**asdict(self), "cuts": [list(cut) for cut in self.cuts]}

    @staticmethod
    def of_json(found: dict[str, Any]) -> Rules:
        """
        >>> Rules.of_json(Rules(cuts=(("x", 3, 1),)).as_json()) == Rules(cuts=(("x", 3, 1),))
        True
        """
        return Rules(**{**found, "cuts": tuple((str(n), int(a), int(b)) for n, a, b in found["cuts"])})
