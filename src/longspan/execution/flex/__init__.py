"""PyTorch's flex attention: its call, its BlockMask, and masks as functions of one rank's own rows."""
