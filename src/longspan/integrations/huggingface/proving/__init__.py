"""Whether a model computes over ranks what it computes on one device: a tiny copy of it is tried, both ways."""
