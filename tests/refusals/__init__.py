"""Calls that must be refused, each with the words of its message."""
