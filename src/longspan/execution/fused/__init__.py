"""Steps that PyTorch takes several kernels for, as one Triton kernel each. GPUs only; PyTorch's operators are what CPUs
use and what these are compared with. Not run on a GPU: interpreted, and compiled to machine code, in tests."""
