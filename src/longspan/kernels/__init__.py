"""Kernels by name. A named kernel is used or refused; "auto" and "sdpa" (PyTorch's fused kernels) choose one."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from longspan import _torch
from longspan.errors import KernelError
from longspan.kernels.contract import Kernel
from longspan.kernels.cpu_flash import CpuFlash
from longspan.kernels.cuda_flash import Flash, cudnn_varlen, implementation, package
from longspan.kernels.cuda_sdpa import Cudnn, Efficient
from longspan.kernels.flex import Flex, why_not_inside
from longspan.kernels.reference import Reference
from longspan.tile import PLAIN, Features, Tile

__all__ = [
    "Features",
    "Kernel",
    "Tile",
    "choose_kernel",
    "full_name",
    "implementation_of",
    "kernel_named",
    "why_not_inside",
]

_log = logging.getLogger("longspan")

_ALL: tuple[Kernel, ...] = (
    *(CpuFlash(), package("FA3"), package("FA4"), cudnn_varlen(), Flash("varlen", grouped=True)),
    *(Efficient(), Flash("flash", False), Cudnn(), Flex(), Reference()),
)
_KERNELS = {kernel.name: kernel for kernel in _ALL}

# Tried in this order. `flash` and `cudnn` are used only when named: `varlen` covers all that they do. `efficient`
# evaluates a mask function on the CPU, block by block, while the GPU waits; `flex` evaluates it inside the kernel.
_CHOICES = {
    "sdpa": ("cpu_flash", "varlen", "efficient"),
    "auto": ("cpu_flash", "fa3", "fa4", "cudnn_varlen", "varlen", "flex", "efficient", "reference"),
}
_FASTER = {
    9: ("fa3", "FlashAttention 3 (flash_attn_3, in hopper/ of github.com/Dao-AILab/flash-attention)"),
    10: ("fa4", "FlashAttention 4 (pip install flash-attn-4) beside PyTorch 2.14 or newer"),
}
"""The kernel that is faster than FA2 on GPUs of a compute capability, and what it needs."""
_COMPUTED_BY = {"fa3": "FA3", "fa4": "FA4", "cudnn": "cuDNN", "cudnn_varlen": "cuDNN"}


_known_choices: dict[object, str] = {}
"""Choices for tensors without functions, by all that they depend on."""
_MAX_CHOICES = 256
_reported: set[str] = set()
"""Choices of "auto" that were logged."""


def kernel_named(name: str) -> Kernel:
    """Return the kernel of that name.

    >>> kernel_named("reference").name
    'reference'
    """
    if not isinstance(name, str) or name not in _KERNELS:
        names = ", ".join((*_CHOICES, *_KERNELS))
        raise KernelError(f"kernel must be one of {names}, but got {name!r}.")
    return _KERNELS[name]


def implementation_of(name: str) -> str:
    """Return the implementation that a kernel runs, as machines name it.

    >>> implementation_of("varlen"), implementation_of("fa3"), implementation_of("reference")
    ('FA2', 'FA3', 'reference')
    """
    return implementation() if name in ("varlen", "flash") else _COMPUTED_BY.get(name, name)


def full_name(name: str) -> str:
    """Return a kernel's name, with its implementation if that is not fixed by the name.

    >>> full_name("varlen"), full_name("fa3")
    ('varlen (FA2)', 'fa3')
    """
    return f"{name} ({implementation()})" if name in ("varlen", "flash") else name


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
    The first choice of "auto" for a kind of GPU and tensors is logged, with the reasons.
    """
    device = q_BHQD.device
    on_cpu = device.type == "cpu"
    key: object = None
    if on_cpu:  # `cpu_flash` takes any shape
        key = name, q_BHQD.dtype, features
    elif not (features.mask_function or features.score_function):
        dims = q_BHQD.shape[1], k_BGKD.shape[1], q_BHQD.shape[3], v_BGKE.shape[3]
        gpu = device, _torch.capability(device), _torch.rocm(), implementation()
        gpu = *gpu, torch.are_deterministic_algorithms_enabled()
        key = name, q_BHQD.dtype, features, dims, gpu
    if (known := _known_choices.get(key)) is not None:
        return known

    def refusal(kernel: Kernel) -> str | None:
        if kernel.name == "flex" != name and on_cpu:  # it writes out all scores there
            return "on CPUs it runs only by name"
        return features.beyond(kernel.honours) or kernel.refuses(q_BHQD, k_BGKD, v_BGKE)

    def passed_over(kernel: Kernel) -> str | None:
        if kernel.name == name:
            return None
        if kernel.name in _COMPUTED_BY and implementation() != "FA2":
            return f"{implementation()} was activated in PyTorch, and `varlen` runs it"
        if kernel.name == "fa4" and (_torch.capability(device) or (0,))[0] < 10:
            return "it was written for compute capability 10.0"
        if kernel.name == "cudnn_varlen" and q_BHQD.shape[1] != k_BGKD.shape[1]:
            return "with groups of heads it runs only by name until somebody has run it on a GPU"
        if kernel.name != "flex":
            return None
        if not (features.mask_function or features.score_function):
            return "it is compiled again for other shapes, and there is no function to run inside it"
        return why_not_inside()

    whys: list[str] = []
    for candidate in _CHOICES.get(name, (name,)):
        kernel = kernel_named(candidate)
        why = refusal(kernel) or passed_over(kernel)
        if why is None:
            if key is not None and (candidate == "cpu_flash" or not on_cpu):
                while len(_known_choices) >= _MAX_CHOICES:
                    del _known_choices[next(iter(_known_choices))]
                _known_choices[key] = candidate
            if name == "auto" and not on_cpu:
                _report(f"kernel 'auto' runs {full_name(candidate)} on {device}", whys[1:])
            if implementation_of(candidate) == "FA2":
                _warn_of_fa2(q_BHQD, k_BGKD, v_BGKE)
            return candidate
        whys.append(f"{candidate}: {why}" if name in _CHOICES else why)
    fit = [repr(other) for other, kernel in _KERNELS.items() if refusal(kernel) is None]
    raise KernelError(f"kernel {name!r} cannot run: {'; '.join(whys)}. Use {' or '.join(fit)}, or 'auto'.")


def _report(choice: str, whys: list[str]) -> None:
    text = f"{choice}{' and not ' if whys else ''}{'; '.join(whys)}"
    if text not in _reported:
        _reported.add(text)
        _log.info("%s", text)


def _warn_of_fa2(*qkv: Tensor) -> None:
    """Warn once if FA2 runs on a GPU for which there is a faster package."""
    capability = _torch.capability(qkv[0].device)
    faster, source = _FASTER.get(capability[0] if capability else 0, (None, ""))
    if faster is None or f"FA2 beside {faster}" in _reported:
        return
    _reported.add(f"FA2 beside {faster}")
    why = _KERNELS[faster].refuses(*qkv)
    state = "It is installed." if why is None else f"It needs {source}, and does not run now: {why}."
    _log.warning("FlashAttention 2 runs on %s, where kernel=%r is faster. %s", qkv[0].device, faster, state)
