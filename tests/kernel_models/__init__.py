"""Fused GPU operators, modelled by address."""
