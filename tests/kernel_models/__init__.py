"""PyTorch's fused GPU operators, modelled by address, and cases for them: `memory`, `operators`, `cases`."""
