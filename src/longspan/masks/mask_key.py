"""Masks as keys of caches."""

from __future__ import annotations

from longspan.masks.mask import Mask


class MaskKey:
    """A mask in a cache: by its bands when it is structured, by identity when a function decides.

    Masks of the same pairs that are cut into other bands are different keys: ranks compare fingerprints, which depend
    on bands, and what a cache still holds differs from rank to rank.

    Two functions cannot be compared. What a function reads may change; `Mask.read_anew` looks.

    >>> from longspan.masks import causal, from_mask_mod
    >>> MaskKey(causal(8)) == MaskKey(causal().resized(8))
    True
    >>> def function(b, h, q, kv): return q >= kv
    >>> MaskKey(from_mask_mod(function, 8)) == MaskKey(from_mask_mod(function, 8))
    False
    """

    def __init__(self, mask: Mask) -> None:
        self.mask = mask
        self.by_value = mask.is_structured

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MaskKey):
            return NotImplemented
        return self.mask is other.mask or (
            self.by_value and other.by_value and self.mask.fingerprint == other.mask.fingerprint
        )

    def __hash__(self) -> int:
        return hash(self.mask.fingerprint) if self.by_value else id(self.mask)
