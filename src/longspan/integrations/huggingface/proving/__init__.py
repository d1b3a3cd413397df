"""Proof that a model computes over ranks what it computes on one device."""
