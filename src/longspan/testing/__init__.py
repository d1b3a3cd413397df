"""Helpers for tests and `verify`: a dense float64 oracle, and all ranks of a plan in one process."""

from longspan.testing.loopback import run_loopback
from longspan.testing.oracle import allowed, dense_attention, dense_gradients

__all__ = ["allowed", "dense_attention", "dense_gradients", "run_loopback"]
