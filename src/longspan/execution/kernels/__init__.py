"""Kernels by name. A named one is obeyed or refused; only "auto" and "sdpa" (PyTorch's fused kernels) choose."""

from __future__ import annotations

from torch import Tensor

from longspan.errors import KernelError
from longspan.execution.kernels.contract import Kernel
from longspan.execution.kernels.cpu_flash import CpuFlash
from longspan.execution.kernels.cuda_flash import Flash
from longspan.execution.kernels.cuda_sdpa import Cudnn, Efficient
from longspan.execution.kernels.flex import Flex
from longspan.execution.kernels.guarded import Guarded
from longspan.execution.kernels.reference import Reference
from longspan.execution.tile import PLAIN, Features, Tile

__all__ = ["Features", "Kernel", "Tile", "choose_kernel", "kernel_named"]

_FUSED = (CpuFlash(), Flash("varlen", grouped=True), Efficient(), Flash("flash", False), Cudnn(), Flex())
_KERNELS: dict[str, Kernel] = {
    **{kernel.name: Guarded(kernel, Reference(), looks=kernel.name == "cpu_flash") for kernel in _FUSED},
    "reference": Reference(),
}

# Asked in this order. `flash` and `cudnn` are left to those who name them: `varlen` does all that they do.
_CHOICES = {
    "sdpa": ("cpu_flash", "varlen", "efficient"),
    "auto": ("cpu_flash", "varlen", "efficient", "flex", "reference"),
}

# On CPUs it writes out all scores: there it is for those who name it, and is not proposed.
_NAMED_ON_CPUS = ("flex",)


def kernel_named(name: str) -> Kernel:
    """The kernel of that name.

    >>> kernel_named("reference").name
    'reference'
    """
    if not isinstance(name, str) or name not in _KERNELS:
        names = ", ".join((*_CHOICES, *_KERNELS))
        raise KernelError(f"kernel {name!r} was asked for, but there is none of that name. Use one of {names}.")
    return _KERNELS[name]


def choose_kernel(name: str, q_BHQD: Tensor, k_BGKD: Tensor, v_BGKE: Tensor, asked: Features = PLAIN) -> str:
    """The name of the kernel to use: the one asked for, or the first of the choice that does this for these tensors."""

    def refusal(kernel: Kernel) -> str | None:
        if q_BHQD.device.type == "cpu" and kernel.name in _NAMED_ON_CPUS and kernel.name != name:
            return "on CPUs it runs when it is named"
        return asked.beyond(kernel.honours) or kernel.refuses(q_BHQD, k_BGKD, v_BGKE)

    whys: list[str] = []
    for candidate in _CHOICES.get(name, (name,)):
        why = refusal(kernel_named(candidate))
        if why is None:
            return candidate
        whys.append(f"{candidate}: {why}" if name in _CHOICES else why)
    fit = [repr(other) for other, kernel in _KERNELS.items() if refusal(kernel) is None]
    raise KernelError(f"kernel {name!r} was asked for, but {'; '.join(whys)}. Use {' or '.join(fit)}, or 'auto'.")
