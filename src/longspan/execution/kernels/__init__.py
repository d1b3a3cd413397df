"""Kernels by name. A named one is obeyed or refused; only "auto" and "sdpa" (PyTorch's fused kernels) choose."""

from __future__ import annotations

from torch import Tensor

from longspan.errors import KernelError
from longspan.execution.kernels.contract import Kernel, Tile
from longspan.execution.kernels.flash_cuda import Flash
from longspan.execution.kernels.reference import Reference
from longspan.execution.kernels.sdpa import CpuFlash
from longspan.execution.kernels.sdpa_cuda import Cudnn, Efficient

__all__ = ["Kernel", "Tile", "choose_kernel", "kernel_named"]

_KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (CpuFlash(), Flash("varlen", grouped=True), Efficient(), Flash("flash", False), Cudnn(), Reference())
}

# Asked in this order. `flash` and `cudnn` are left to those who name them: `varlen` does all that they do.
_CHOICES = {"sdpa": ("cpu_flash", "varlen", "efficient"), "auto": ("cpu_flash", "varlen", "efficient", "reference")}


def kernel_named(name: str) -> Kernel:
    """The kernel of that name.

    >>> kernel_named("reference").name
    'reference'
    """
    if name not in _KERNELS:
        names = ", ".join((*_CHOICES, *_KERNELS))
        raise KernelError(f"kernel {name!r} was asked for, but there is none of that name. Use one of {names}.")
    return _KERNELS[name]


def choose_kernel(name: str, q_BHQD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor) -> str:
    """The name of the kernel to use: the one asked for, or the first of the choice that takes these tensors."""
    whys: list[str] = []
    for candidate in _CHOICES.get(name, (name,)):
        why = kernel_named(candidate).refuses(q_BHQD, k_BGKD, v_BGKE)
        if why is None:
            return candidate
        whys.append(f"{candidate}: {why}" if name in _CHOICES else why)
    fit = [repr(other) for other, kernel in _KERNELS.items() if kernel.refuses(q_BHQD, k_BGKD, v_BGKE) is None]
    raise KernelError(f"kernel {name!r} was asked for, but {'; '.join(whys)}. Use {' or '.join(fit)}, or 'auto'.")
