"""Deliberate mistakes in our own code: each must be caught by a test."""
