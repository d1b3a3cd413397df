"""Layouts: which rank holds which tokens. A layout is made once per batch and serves every mask of the model."""

from longspan.layouts.balance import balanced
from longspan.layouts.layout import Layout
from longspan.layouts.patterns import contiguous, like_dtensor, per_document, round_robin_by_work, striped, zigzag

__all__ = [
    "Layout",
    "balanced",
    "contiguous",
    "like_dtensor",
    "per_document",
    "round_robin_by_work",
    "striped",
    "zigzag",
]
