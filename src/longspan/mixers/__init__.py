"""Convolutions and linear recurrences: what mixes tokens beside attention."""
