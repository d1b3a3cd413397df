"""Layouts: which rank holds which tokens. A layout is built once per batch, for all masks of the model."""

from longspan.layouts.balance import balanced
from longspan.layouts.layout import Layout
from longspan.layouts.patterns import contiguous, like_dtensor, per_document, round_robin_by_work, striped, zigzag
from longspan.layouts.placement import whole_documents

__all__ = [
    "Layout",
    "balanced",
    "contiguous",
    "like_dtensor",
    "per_document",
    "round_robin_by_work",
    "striped",
    "whole_documents",
    "zigzag",
]
