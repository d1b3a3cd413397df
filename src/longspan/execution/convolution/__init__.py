"""Causal convolutions over shards: halos come by an operator, the convolution itself is plain PyTorch."""
