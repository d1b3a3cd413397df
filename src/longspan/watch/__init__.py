"""Heartbeats: detect ranks that died, hang or make other calls, and name them."""
