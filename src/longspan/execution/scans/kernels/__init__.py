"""Kernels of recurrences by name. A named one is obeyed or refused; only "auto" chooses."""

from __future__ import annotations

from longspan.errors import KernelError
from longspan.execution.scans.contract import ScanKernel, ScanWork
from longspan.execution.scans.kernels.fla import FlaScan
from longspan.execution.scans.kernels.mamba_ssm import MambaScan
from longspan.execution.scans.kernels.reference import ReferenceScan
from longspan.execution.scans.own import OwnKernel

__all__ = ["choose_scan_kernel", "scan_kernel_named"]

_ALL = FlaScan(), MambaScan(), ReferenceScan(), OwnKernel()  # in the order in which "auto" asks them
_KERNELS: dict[str, ScanKernel] = {kernel.name: kernel for kernel in _ALL}


def scan_kernel_named(name: str) -> ScanKernel:
    """The kernel of that name.

    >>> scan_kernel_named("reference").name
    'reference'
    """
    if not isinstance(name, str) or name not in _KERNELS:
        names = ", ".join(("auto", *_KERNELS))
        raise KernelError(
            f"kernel {name!r} was asked for, but there is none of that name for recurrences. Use one of {names}."
        )
    return _KERNELS[name]


def choose_scan_kernel(asked: str, work: ScanWork) -> ScanKernel:
    """The kernel asked for, or the first that can compute this."""
    named = list(_KERNELS.values()) if asked == "auto" else [scan_kernel_named(asked)]
    whys = []
    for kernel in named:
        why = kernel.why_not(work)
        if why is None:
            return kernel
        whys.append(f"{kernel.name}: {why}" if asked == "auto" else why)
    fit = [repr(name) for name, kernel in _KERNELS.items() if kernel.why_not(work) is None]
    advice = f"Use {' or '.join(fit)}, or 'auto'." if fit else "No kernel can."
    raise KernelError(f"kernel {asked!r} was asked for, but {'; '.join(whys)}. {advice}")
