"""Kernels of recurrences by name. A named one is obeyed or refused; only "auto" chooses."""

from __future__ import annotations

from longspan.errors import KernelError
from longspan.execution.scans.contract import ScanKernel, ScanWork
from longspan.execution.scans.kernels.reference import ReferenceScan
from longspan.execution.scans.own import OwnKernel

__all__ = ["choose_scan_kernel", "scan_kernel_named"]

_KERNELS: dict[str, ScanKernel] = {kernel.name: kernel for kernel in (ReferenceScan(), OwnKernel())}


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
    if asked != "auto":
        kernel = scan_kernel_named(asked)
        why = kernel.why_not(work)
        if why is None:
            return kernel
        raise KernelError(f"kernel {asked!r} was asked for, but {why}. Use 'reference' or 'auto'.")
    return next(kernel for kernel in _KERNELS.values() if kernel.why_not(work) is None)
