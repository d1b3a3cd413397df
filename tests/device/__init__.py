"""A stand-in for a GPU, on machines without one: the GPU's rules of order, memory and devices, with the CPU's kernels.

`native/` is a C++ extension for PyTorch, built by `build.py`: streams that run later on threads of their own, events, a
caching allocator that hands out NaN, pinned copies, generators, autocast, and a process-group backend with NCCL's
rules. `forms.py` starts it in a process in one of two forms:

- "standin": a device of PyTorch's own extension point (PrivateUse1), `torch.device("standin", 0)`;
- "cuda": takes the place of CUDA in a CPU build of PyTorch. `torch.cuda` answers, "nccl" is the stand-in's backend, and
  the project's models of fused operators (`kernel_models/`) are registered where CUDA's kernels would be.

Both change PyTorch for the whole process, so tests run in processes of their own: `ranks.py`.

What it shows: that results do not depend on when kernels and messages run, that no tensor is left on another device,
which lines make the host wait, which branches GPUs take. What it cannot show: real kernels, Triton, NCCL itself, memory
limits, speed.
"""
