"""Kernels of recurrences by name: `reference`, fla, mamba_ssm, and users' functions.

A named kernel is used or refused; only "auto" chooses.
"""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from longspan.errors import KernelError
from longspan.mixers.recurrences import GatedDelta, LinearAttention, Recurrence, ScanKernel, ScanWork, Segments, Ssd
from longspan.mixers.scan_reference import (
    ChunkTable,
    ReferenceScan,
    cut,
    own_precision,
    packing,
    passed,
    stepped,
    values_of,
)
from longspan.spans import Ints

# -- Kernels of other packages: why one cannot be used, and diagonal maps, which need no kernel ------------------------


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


# -- flash-linear-attention: Triton kernels of delta rules and linear attention ----------------------------------------
# Segments are passed as its `cu_seqlens`.


MOST_KEYS = 256
"""Features of keys that the kernels of delta rules take."""


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
        if isinstance(work.recurrence, GatedDelta) and features > MOST_KEYS:
            return f"it takes keys of up to {MOST_KEYS} features, and these have {features}"
        return None

    def address(self, work: ScanWork) -> tuple[str, str]:
        by_rows = work.tokens[3].ndim == 4
        if isinstance(work.recurrence, GatedDelta):
            found = ("kda", "chunk_kda") if by_rows else ("gated_delta_rule", "chunk_gated_delta_rule")
        else:
            found = ("gla", "chunk_gla") if by_rows else ("simple_gla", "chunk_simple_gla")
        return f"fla.ops.{found[0]}", found[1]

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
            start = nothing(work)
            if isinstance(work.recurrence, LinearAttention):
                with own_precision(work):
                    return passed(work), self.local(work, start)[1]
            q, k, v, *rest = work.tokens
            features = k.shape[3], v.shape[3]
            one = torch.eye(features[0], device=v.device).expand(*start.shape[:2], -1, -1)
            wide = torch.nn.functional.pad(v, (0, features[0]))  # values [v | 0] and states [0 | I] give [U | M]
            both = replace(work, tokens=(q, k, wide, *rest))
            u, m = self.local(both, torch.cat((start, one), -1))[1].split(features[::-1], -1)
            return m, u


# -- mamba_ssm: Triton kernels of Mamba-2 ------------------------------------------------------------------------------
# They take one entering state per batch row, so every segment becomes a batch row, and segments of about the same
# length are computed together.


CHUNK = 16, 256
"""Tokens of a chunk of theirs: at least, at most."""


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
        groups = alike(work.segments)
        out, after = torch.zeros_like(work.tokens[0]), []
        for which, longest in groups:
            table = cut(work.segments.of(which), longest, batch, slots, states.device)
            part, left = self._rows(work, table, states[torch.as_tensor(which, device=states.device)])
            out = out + table.unfold(part.flatten(2).unsqueeze(1)).view(out.shape)  # each slot is in one of them
            after.append(left)
        place = torch.as_tensor(np.argsort(np.concatenate([which for which, _ in groups])), device=states.device)
        return out, torch.cat(after)[place]

    def _rows(self, work: ScanWork, table: ChunkTable, states: Tensor) -> tuple[Tensor, Tensor]:
        """Output (segments, longest, H, V), and the states that leave."""
        assert isinstance(work.recurrence, Ssd)
        x, dt, b, c = (table.fold(y.flatten(2).unsqueeze(2)).squeeze(1).unflatten(2, y.shape[2:]) for y in work.tokens)
        with own_precision(work):
            ended = (table.slot < 0)[:, None, None, :, None]
            by_heads = dt.float().mT[:, None, ..., None]  # one key head, as far as steps are concerned
            steps = stepped(by_heads, ended, work.recurrence, work.shared)[0][:, 0, ..., 0].mT
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
        with torch.no_grad(), own_precision(work):
            return passed(work), self.local(work, nothing(work))[1]


def alike(segments: Segments) -> list[tuple[Ints, int]]:
    """Numbers of segments that are computed together, and the length of the longest: of those that are together, none
    is less than half as long, so at most half of what is computed is blank.

    >>> [(which.tolist(), n) for which, n in alike(Segments(np.array([[0, 0, 5], [0, 5, 14], [0, 14, 16]])))]
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


Local = Callable[..., Any]


@dataclass(frozen=True, eq=False)
class OwnRecurrence(Recurrence):
    """`local(*tokens, state)` gives output and state of one segment of one batch row, `summary(*tokens)` M and U."""

    local: Local
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
        recurrence = _own(work)
        outs: list[tuple[tuple[int, int, int], Tensor]] = []
        leaving: list[Tensor] = []
        for (row, start, stop), state in zip(work.segments.table.tolist(), states, strict=True):
            part = [x[row, start:stop] for x in work.tokens]
            out, after = _pair(recurrence.local(*part, state), "local(...) must return output and state")
            _check(out, (stop - start,), "local(...) must return an output with one row for each token")
            _check(after, recurrence.state, "local(...) must return a state of shape")
            outs.append(((row, start, stop), out))
            leaving.append(after.to(states.dtype))
        if not outs:  # a rank without tokens asks what an output looks like
            none = recurrence.local(*(x[0, :0] for x in work.tokens), states.new_zeros(recurrence.state))
            empty, _ = _pair(none, "local(...) must return output and state, also of no tokens")
            _check(empty, (0,), "local(...) must return an output with one row for each token, also of no tokens:")
            return empty.new_zeros((*work.tokens[0].shape[:2], *empty.shape[1:])), states
        return _placed(outs, work), torch.stack(leaving)

    def summary(self, work: ScanWork) -> tuple[Tensor, Tensor]:
        recurrence, dtype = _own(work), work.recurrence.state_dtype(work.tokens)
        found: list[tuple[Tensor, Tensor]] = []
        with torch.no_grad():
            for row, start, stop in work.segments.table.tolist():
                both = recurrence.summary(*(x[row, start:stop] for x in work.tokens))
                m, u = _pair(both, "summary(...) must return M and U")
                _check(m, recurrence.maps, "summary(...) must return M of shape")
                _check(u, recurrence.state, "summary(...) must return U of shape")
                found.append((m.to(dtype), u.to(dtype)))
        if not found:
            like = work.tokens[0].new_empty((0,), dtype=dtype)
            return like.view(0, *recurrence.maps), like.view(0, *recurrence.state)
        return torch.stack([m for m, _ in found]), torch.stack([u for _, u in found])


def _own(work: ScanWork) -> OwnRecurrence:
    assert isinstance(work.recurrence, OwnRecurrence)
    return work.recurrence


def _pair(found: Any, what: str) -> tuple[Any, Any]:
    if not isinstance(found, tuple | list) or len(found) != 2:
        given = f"{len(found)} values" if isinstance(found, tuple | list) else type(found).__name__
        raise KernelError(f"{what}, but {given} was returned.")
    return found[0], found[1]


def _check(found: Any, shape: tuple[int, ...], what: str) -> None:
    if not isinstance(found, Tensor) or tuple(found.shape[: len(shape)]) != shape:
        given = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise KernelError(f"{what} {shape}, but {given} was returned.")


def _placed(outs: list[tuple[tuple[int, int, int], Tensor]], work: ScanWork) -> Tensor:
    """Outputs of segments in their slots; slots of padding are 0."""
    batch, slots = work.tokens[0].shape[:2]
    whole = outs[0][1].new_zeros((batch, slots, *outs[0][1].shape[1:]))
    rows = [torch.full((stop - start,), row) for (row, start, stop), _ in outs]
    places = [torch.arange(start, stop) for (_, start, stop), _ in outs]
    at = tuple(torch.cat(parts).to(whole.device) for parts in (rows, places))
    return whole.index_put(at, torch.cat([out for _, out in outs]))


# -- Kernels by name ---------------------------------------------------------------------------------------------------


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
