"""Kernels of recurrences by name: `reference`, fla, mamba_ssm, and user-defined functions.

A named kernel is used or refused; only "auto" chooses.
"""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from longspan.errors import KernelError
from longspan.layouts.layout import to_device
from longspan.mixers.scan_reference import (
    ChunkTable,
    GatedDelta,
    LinearAttention,
    Recurrence,
    ReferenceScan,
    ScanKernel,
    ScanWork,
    Segments,
    Ssd,
    build_chunk_table,
    diagonal_maps,
    discretize,
    packing,
    values_of,
    without_autocast,
)
from longspan.spans import Ints

# -- Kernels of other packages: why one cannot be used, and diagonal maps, which need no kernel ------------------------


HALVES = torch.bfloat16, torch.float16, torch.float32


class PackageScan(ScanKernel):
    """A kernel in a package that is imported on first use."""

    package: ClassVar[str]
    install: ClassVar[str]
    """The package's name for pip."""

    @abstractmethod
    def why_not_this(self, work: ScanWork) -> str | None:
        """Return why the package has no function for it, or None."""

    @abstractmethod
    def address(self, work: ScanWork) -> tuple[str, str]:
        """Return module and name of the function that computes it."""

    @abstractmethod
    def run(self, work: ScanWork, states: Tensor) -> tuple[Tensor, Tensor]:
        """Run `local`; there is at least one segment."""

    def why_not(self, work: ScanWork) -> str | None:
        tokens, table = work.tokens, work.segments.table
        reason = self.why_not_this(work)
        if reason is not None:
            return reason
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


# -- flash-linear-attention: Triton kernels of delta rules and linear attention ----------------------------------------
# Segments are passed as its `cu_seqlens`.


MAX_KEYS = 256
"""The largest size of keys that the kernels of delta rules take."""


class FlaScan(PackageScan):
    """Delta rules and linear attention, each with one decay for a head or one for each row of its state."""

    name = "fla"
    package = "fla"
    install = "flash-linear-attention"

    def why_not_this(self, work: ScanWork) -> str | None:
        if not isinstance(work.recurrence, GatedDelta | LinearAttention):
            return f"it has no function for the recurrence {work.recurrence.name!r}"
        dtypes = {str(x.dtype) for x in work.tokens[:3]}
        if len(dtypes) > 1:
            return f"it takes q, k and v of one dtype, and they are {', '.join(sorted(dtypes))}"
        features = work.tokens[1].shape[3]
        if isinstance(work.recurrence, GatedDelta) and features > MAX_KEYS:
            return f"it takes keys of up to {MAX_KEYS} features, and these have {features}"
        return None

    def address(self, work: ScanWork) -> tuple[str, str]:
        by_rows = work.tokens[3].ndim == 4
        if isinstance(work.recurrence, GatedDelta):
            name = "kda" if by_rows else "gated_delta_rule"
        else:
            name = "gla" if by_rows else "simple_gla"
        return f"fla.ops.{name}", f"chunk_{name}"

    def run(self, work: ScanWork, states: Tensor) -> tuple[Tensor, Tensor]:
        recurrence, values = work.recurrence, values_of(work)
        assert isinstance(recurrence, GatedDelta | LinearAttention)
        batch, slots = values.shape[:2]
        packed = packing(work.segments, batch, slots, values.device)
        q, k, v, g, *beta = map(packed.pack, work.tokens)
        options = {"scale": recurrence.scale}
        if isinstance(recurrence, GatedDelta):
            options["use_qk_l2norm_in_kernel"] = recurrence.l2norm
        else:  # only delta rules share keys between heads
            q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
        out, after = self.function(work)(
            q, k, v, g.float(), *beta,
            initial_state=states.contiguous(), output_final_state=True, cu_seqlens=packed.edges, **options,
        )  # fmt: skip
        return packed.unpack(out, values.shape), after

    def summary(self, work: ScanWork) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            start = work.zero_states()
            if isinstance(work.recurrence, LinearAttention):
                with without_autocast(work):
                    return diagonal_maps(work), self.local(work, start)[1]
            q, k, v, *rest = work.tokens
            features = k.shape[3], v.shape[3]
            one = torch.eye(features[0], device=v.device).expand(*start.shape[:2], -1, -1)
            wide = torch.nn.functional.pad(v, (0, features[0]))  # values [v | 0] and states [0 | I] give [U | M]
            both = replace(work, tokens=(q, k, wide, *rest))
            u, m = self.local(both, torch.cat((start, one), -1))[1].split(features[::-1], -1)
            return m, u

    def prepare(self, segments: Segments, shape: Sequence[int], device: torch.device) -> None:
        packing(segments, shape[0], shape[1], device)


# -- mamba_ssm: Triton kernels of Mamba-2 ------------------------------------------------------------------------------
# They take one entering state per batch row, so every segment becomes a batch row, and segments of about the same
# length are computed together.


CHUNK = 16, 256
"""The smallest and the largest number of tokens in one of its chunks."""


class MambaScan(PackageScan):
    """Mamba-2."""

    name = "mamba_ssm"
    package = "mamba_ssm"
    install = "mamba_ssm"

    def why_not_this(self, work: ScanWork) -> str | None:
        if not isinstance(work.recurrence, Ssd):
            return f"it has no function for the recurrence {work.recurrence.name!r}"
        x, _, b, c = work.tokens
        dtypes = {str(y.dtype) for y in (x, b, c)}
        if len(dtypes) > 1:
            return f"it takes x, B and C of one dtype, and they are {', '.join(sorted(dtypes))}"
        return None

    def address(self, work: ScanWork) -> tuple[str, str]:  # noqa: ARG002
        return "mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined"

    def run(self, work: ScanWork, states: Tensor) -> tuple[Tensor, Tensor]:
        batch, slots = work.tokens[0].shape[:2]
        groups = group_by_length(work.segments)
        out, after = torch.zeros_like(work.tokens[0]), []
        for which, longest in groups:
            table = build_chunk_table(work.segments.select(which), longest, batch, slots, states.device)
            part, left = self._rows(work, table, states[to_device(torch.from_numpy(which), states.device)])
            out = out + table.unfold(part.flatten(2).unsqueeze(1)).view(out.shape)  # each slot is in one group
            after.append(left)
        place = torch.from_numpy(np.argsort(np.concatenate([which for which, _ in groups])))
        return out, torch.cat(after)[to_device(place, states.device)]

    def _rows(self, work: ScanWork, table: ChunkTable, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return output (segments, longest, H, V), and the states that leave."""
        assert isinstance(work.recurrence, Ssd)
        x, dt, b, c = (table.fold(y.flatten(2).unsqueeze(2)).squeeze(1).unflatten(2, y.shape[2:]) for y in work.tokens)
        with without_autocast(work):
            ended = (table.slot < 0)[:, None, None, :, None]
            by_heads = dt.float().mT[:, None, ..., None]  # as if there were one key head
            steps = discretize(by_heads, ended, work.recurrence, work.shared)[0][:, 0, ..., 0].mT
        a, d, _ = work.shared
        assert a is not None
        size = min(max(1 << (table.size - 1).bit_length(), CHUNK[0]), CHUNK[1])
        out, after = self.function(work)(
            x, steps.contiguous(), a.float(), b, c, size,
            D=None if d is None else d.contiguous(), initial_states=states.mT.contiguous(),
            dt_limit=(float("-inf"), float("inf")), return_final_states=True,
        )  # fmt: skip
        return out, after.mT

    def summary(self, work: ScanWork) -> tuple[Tensor, Tensor]:
        with torch.no_grad(), without_autocast(work):
            return diagonal_maps(work), self.local(work, work.zero_states())[1]

    def prepare(self, segments: Segments, shape: Sequence[int], device: torch.device) -> None:
        for which, longest in group_by_length(segments) if len(segments) else ():
            build_chunk_table(segments.select(which), longest, shape[0], shape[1], device)


def group_by_length(segments: Segments) -> list[tuple[Ints, int]]:
    """Return groups of segments that are computed together, each with the length of its longest segment. None is less
    than half as long as the longest, so at most half of the computed tokens are padding.

    >>> [(which.tolist(), n) for which, n in group_by_length(Segments(np.array([[0, 0, 5], [0, 5, 14], [0, 14, 16]])))]
    [([1, 0], 9), ([2], 2)]
    """
    lengths = segments.table[:, 2] - segments.table[:, 1]
    order = np.argsort(-lengths, kind="stable")
    begins = [0]
    for at in range(1, len(order)):
        if 2 * lengths[order[at]] < lengths[order[begins[-1]]]:
            begins.append(at)
    return [(order[i:j], int(lengths[order[i]])) for i, j in pairwise([*begins, len(order)])]


# -- User-defined recurrences: two functions of one segment's tokens, called segment by segment ------------------------


@dataclass(frozen=True, eq=False)
class OwnRecurrence(Recurrence):
    """`local(*tokens, state)` returns output and state of one segment of one batch row, `summary(*tokens)` M and U."""

    local: Callable[..., Any]
    summary: Callable[..., Any]
    state: tuple[int, int, int]
    maps: tuple[int, int, int]
    is_dense: bool
    parameters: tuple[Tensor, ...] = ()
    name = "scan"

    @property
    def captured(self) -> tuple[Tensor, ...]:
        return self.parameters

    def state_shape(self, tokens: tuple[Tensor, ...]) -> tuple[int, int, int]:  # noqa: ARG002
        return self.state

    def map_shape(self, tokens: tuple[Tensor, ...]) -> tuple[int, int, int]:  # noqa: ARG002
        return self.maps

    def __repr__(self) -> str:
        functions = [getattr(f, "__qualname__", type(f).__name__) for f in (self.local, self.summary)]
        return f"scan({', '.join(functions)})"


class OwnKernel(ScanKernel):
    """Calls the user's functions on each segment."""

    name = "own"

    def why_not(self, work: ScanWork) -> str | None:
        return None if isinstance(work.recurrence, OwnRecurrence) else "it runs functions of ls.scan only"

    def local(self, work: ScanWork, states: Tensor) -> tuple[Tensor, Tensor]:
        recurrence, (batch, slots) = work.recurrence, work.tokens[0].shape[:2]
        assert isinstance(recurrence, OwnRecurrence)
        outs, leaving, rows, places = [], [], [], []
        for (row, start, stop), state in zip(work.segments.table.tolist(), states, strict=True):
            part = [x[row, start:stop] for x in work.tokens]
            out, after = _check_pair(recurrence.local(*part, state), "local(...) must return output and state")
            _check_shape(out, (stop - start,), "local(...) must return an output with one row for each token")
            _check_shape(after, recurrence.state, "local(...) must return a state of shape")
            outs.append(out)
            leaving.append(after.to(states.dtype))
            rows.append(torch.full((stop - start,), row))
            places.append(torch.arange(start, stop))
        if not outs:  # a rank without tokens, which needs the shape of an output
            pair = recurrence.local(*(x[0, :0] for x in work.tokens), states.new_zeros(recurrence.state))
            empty, _ = _check_pair(pair, "local(...) must return output and state, also for no tokens")
            _check_shape(empty, (0,), "local(...) must return an output with one row for each token, also for none:")
            return empty.new_zeros((batch, slots, *empty.shape[1:])), states
        whole = outs[0].new_zeros((batch, slots, *outs[0].shape[1:]))  # padding is 0
        index = tuple(to_device(torch.cat(part), whole.device) for part in (rows, places))
        return whole.index_put(index, torch.cat(outs)), torch.stack(leaving)

    def summary(self, work: ScanWork) -> tuple[Tensor, Tensor]:
        recurrence, dtype = work.recurrence, work.recurrence.state_dtype(work.tokens)
        assert isinstance(recurrence, OwnRecurrence)
        maps: list[Tensor] = []
        states: list[Tensor] = []
        with torch.no_grad():
            for row, start, stop in work.segments.table.tolist():
                pair = recurrence.summary(*(x[row, start:stop] for x in work.tokens))
                m, u = _check_pair(pair, "summary(...) must return M and U")
                _check_shape(m, recurrence.maps, "summary(...) must return M of shape")
                _check_shape(u, recurrence.state, "summary(...) must return U of shape")
                maps.append(m.to(dtype))
                states.append(u.to(dtype))
        if not maps:
            empty = work.tokens[0].new_empty((0,), dtype=dtype)
            return empty.view(0, *recurrence.maps), empty.view(0, *recurrence.state)
        return torch.stack(maps), torch.stack(states)


def _check_pair(pair: Any, expected: str) -> tuple[Any, Any]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        got = f"{len(pair)} values" if isinstance(pair, tuple | list) else type(pair).__name__
        raise KernelError(f"{expected}, but got {got}.")
    return pair[0], pair[1]


def _check_shape(tensor: Any, shape: tuple[int, ...], expected: str) -> None:
    if not isinstance(tensor, Tensor) or tuple(tensor.shape[: len(shape)]) != shape:
        got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        raise KernelError(f"{expected} {shape}, but got {got}.")


# -- Kernels by name ---------------------------------------------------------------------------------------------------


_ALL = FlaScan(), MambaScan(), ReferenceScan(), OwnKernel()  # in the order in which "auto" tries them
_KERNELS: dict[str, ScanKernel] = {kernel.name: kernel for kernel in _ALL}


def scan_kernel_named(name: str) -> ScanKernel:
    """Return the kernel of that name.

    >>> scan_kernel_named("reference").name
    'reference'
    """
    if not isinstance(name, str) or name not in _KERNELS:
        names = [known for known in _KERNELS if known != OwnKernel.name]  # that one is never named
        raise KernelError(f"kernel must be one of {', '.join(('auto', *names))}, but got {name!r}.")
    return _KERNELS[name]


def choose_scan_kernel(name: str, work: ScanWork) -> ScanKernel:
    """Return the kernel of that name, or for "auto" the first that can compute this."""
    reasons = []
    for kernel in _KERNELS.values() if name == "auto" else [scan_kernel_named(name)]:
        reason = kernel.why_not(work)
        if reason is None:
            return kernel
        reasons.append(f"{kernel.name}: {reason}" if name == "auto" else reason)
    able = [repr(other) for other, kernel in _KERNELS.items() if kernel.why_not(work) is None]
    advice = f"Use {' or '.join(able)}, or 'auto'." if able else "No kernel can."
    raise KernelError(f"kernel {name!r} cannot compute this: {'; '.join(reasons)}. {advice}")
