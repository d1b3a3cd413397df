"""Kernels by name. A named kernel is used or refused; "auto" and "sdpa" (PyTorch's fused kernels) choose one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from longspan.errors import KernelError
from longspan.kernels.contract import Kernel
from longspan.kernels.cpu_flash import CpuFlash
from longspan.kernels.cuda_flash import Flash
from longspan.kernels.cuda_sdpa import Cudnn, Efficient
from longspan.kernels.flex import Flex, why_not_inside
from longspan.kernels.panels import Guarded
from longspan.kernels.reference import Reference
from longspan.tile import PLAIN, Features, Tile

__all__ = ["Features", "Kernel", "Tile", "choose_kernel", "kernel_named", "why_not_inside"]

_FUSED = (CpuFlash(), Flash("varlen", grouped=True), Efficient(), Flash("flash", False), Cudnn(), Flex())
_KERNELS: dict[str, Kernel] = {
    **{kernel.name: Guarded(kernel, Reference(), checks_finite=kernel.name == "cpu_flash") for kernel in _FUSED},
    "reference": Reference(),
}

# Tried in this order. `flash` and `cudnn` are used only when named: `varlen` covers all that they do. `efficient`
# evaluates a mask function on the CPU, block by block, while the GPU waits; `flex` evaluates it inside the kernel.
_CHOICES = {
    "sdpa": ("cpu_flash", "varlen", "efficient"),
    "auto": ("cpu_flash", "varlen", "flex", "efficient", "reference"),
}


_cpu_choices: set[tuple[str, torch.dtype, Features]] = set()
"""Arguments for which `cpu_flash` was chosen: it takes any shape, so the choice is the same every time."""


def kernel_named(name: str) -> Kernel:
    """Return the kernel of that name.

    >>> kernel_named("reference").name
    'reference'
    """
    if not isinstance(name, str) or name not in _KERNELS:
        names = ", ".join((*_CHOICES, *_KERNELS))
        raise KernelError(f"kernel must be one of {names}, but got {name!r}.")
    return _KERNELS[name]


def choose_kernel(
    name: str,
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKE: Tensor,
    features: Features = PLAIN,
    why_not_inside: Callable[[], str | None] = lambda: None,
) -> str:
    """Return the name of the kernel to use: `name`, or the first candidate that takes these tensors and features.

    `why_not_inside` returns why functions cannot run inside a kernel, or None; it is called if `flex` would be chosen.
    """
    on_cpu = q_BHQD.device.type == "cpu"
    if on_cpu and (name, q_BHQD.dtype, features) in _cpu_choices:
        return "cpu_flash"

    def refusal(kernel: Kernel) -> str | None:
        if kernel.name == "flex" != name and on_cpu:  # it writes out all scores there
            return "on CPUs it runs only by name"
        return features.beyond(kernel.honours) or kernel.refuses(q_BHQD, k_BGKD, v_BGKE)

    def passed_over(kernel: Kernel) -> str | None:
        if kernel.name != "flex" or name == "flex":
            return None
        if not (features.mask_function or features.score_function):
            return "it is compiled again for other shapes, and there is no function to run inside it"
        return why_not_inside()

    whys: list[str] = []
    for candidate in _CHOICES.get(name, (name,)):
        kernel = kernel_named(candidate)
        why = refusal(kernel) or passed_over(kernel)
        if why is None:
            if candidate == "cpu_flash":
                _cpu_choices.add((name, q_BHQD.dtype, features))
            return candidate
        whys.append(f"{candidate}: {why}" if name in _CHOICES else why)
    fit = [repr(other) for other, kernel in _KERNELS.items() if refusal(kernel) is None]
    raise KernelError(f"kernel {name!r} cannot run: {'; '.join(whys)}. Use {' or '.join(fit)}, or 'auto'.")
