"""A user's attention call against one device: comparison, leaks, and the likely mistake."""
