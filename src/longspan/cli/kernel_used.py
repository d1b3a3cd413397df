"""Where a command's tensors live and which kernel `auto` takes for them, in a word."""

from __future__ import annotations

from typing import Any

from longspan.schedules.steps import Sizes


def kernel_used(sizes: Sizes, dtype: str, device: Any, **features: bool) -> str:
    """The kernel's name, and whose flash attention it is where that can be chosen.

    >>> kernel_used(Sizes(4, 2, 64, 64, 2), "bfloat16", "cpu"), kernel_used(Sizes(4, 2, 64, 64, 4), "float32", "cpu",
    ...     score_function=True)
    ('cpu_flash', 'reference')
    """
    import torch

    from longspan.execution.kernels import choose_kernel
    from longspan.execution.kernels.cuda_flash import implementation
    from longspan.execution.tile import Features

    shapes = (sizes.q_heads, sizes.head_dim), (sizes.kv_heads, sizes.head_dim), (sizes.kv_heads, sizes.v_head_dim)
    q, k, v = (torch.zeros(1, heads, 16, dim, dtype=getattr(torch, dtype), device=device) for heads, dim in shapes)
    name = choose_kernel("auto", q, k, v, Features(**features))
    return f"{name} ({implementation()})" if name in ("varlen", "flash") else name


def device_used(device: Any) -> str:
    """The device, and the GPU's own name.

    >>> device_used("cpu")
    'cpu'
    """
    if str(device) == "cpu":
        return "cpu"
    import torch

    return f"{device} ({torch.cuda.get_device_name(device)})" if str(device).startswith("cuda") else str(device)
