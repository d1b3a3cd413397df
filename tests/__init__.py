"""Tests, by room: README.md says where a new one goes."""
