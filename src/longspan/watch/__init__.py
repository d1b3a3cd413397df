"""Heartbeats and failure detection: find ranks that died, hang or make other calls, and name them."""
