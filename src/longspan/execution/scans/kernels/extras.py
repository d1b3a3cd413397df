"""Kernels of other packages: why they cannot compute something, and what of diagonal maps needs no kernel of theirs."""

from __future__ import annotations

import importlib
from abc import abstractmethod
from importlib.util import find_spec
from typing import Any, ClassVar

import torch
from torch import Tensor

from longspan.execution.scans.contract import ScanKernel, ScanWork
from longspan.execution.scans.kernels.forms import values_of

HALVES = torch.bfloat16, torch.float16, torch.float32


class PackageScan(ScanKernel):
    """Functions of a package that is imported when one of them is called for the first time."""

    package: ClassVar[str]
    install: ClassVar[str]
    """What brings it."""

    @abstractmethod
    def why_not_this(self, work: ScanWork) -> str | None:
        """Why the package has no function for it, or None."""

    @abstractmethod
    def address(self, work: ScanWork) -> tuple[str, str]:
        """Module and name of the function that computes it."""

    @abstractmethod
    def run(self, work: ScanWork, states: Tensor) -> tuple[Tensor, Tensor]:
        """`local`, where there are segments."""

    def why_not(self, work: ScanWork) -> str | None:
        tokens, table = work.tokens, work.segments.table
        if (why := self.why_not_this(work)) is not None:
            return why
        if tokens[0].device.type != "cuda":
            return f"it runs on GPUs, and the tensors are on {tokens[0].device}"
        if any(x.dtype not in HALVES for x in tokens):
            return f"it computes in float32, and there are {', '.join(sorted({str(x.dtype) for x in tokens}))}"
        if bool((table[:, 1] >= table[:, 2]).any()):
            return "it takes no segments without tokens"
        if find_spec(self.package) is None:
            return f"the package {self.package} is not installed (pip install {self.install})"
        try:
            self.function(work)
        except (ImportError, AttributeError, OSError) as error:  # a library that does not load is an OSError
            return f"its function {'.'.join(self.address(work))} cannot be imported: {error}"
        return None

    def function(self, work: ScanWork) -> Any:
        module, name = self.address(work)
        return getattr(importlib.import_module(module), name)

    def local(self, work: ScanWork, states: Tensor) -> tuple[Tensor, Tensor]:
        if not len(work.segments):
            return torch.zeros_like(values_of(work)), states
        return self.run(work, states)


def nothing(work: ScanWork) -> Tensor:
    """Entering states of zeros."""
    shape = work.recurrence.state_shape(work.tokens)
    return torch.zeros(
        len(work.segments), *shape, dtype=work.recurrence.state_dtype(work.tokens), device=work.tokens[0].device
    )
