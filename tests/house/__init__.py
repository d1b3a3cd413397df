"""The house itself: rooms, names, pages, packages, what a release contains."""
