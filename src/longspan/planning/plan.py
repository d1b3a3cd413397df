"""Plan: mask, layout, sizes and scheme as a frozen value, with a fingerprint, a text form and reasons."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, ClassVar, Protocol, TypeVar, overload

import numpy as np

from longspan._compile import Handled, opaque
from longspan.errors import PlanError
from longspan.formatting import bytes_text
from longspan.layouts import Layout
from longspan.layouts.layout import carried_layout_of, other_tokens
from longspan.masks import Mask
from longspan.masks.mask import MaskKey
from longspan.masks.work import block_work
from longspan.planning.backward_plan import reverse
from longspan.planning.choose import REASON_HEAD, TIE, Reason, choose, compare, device_bytes, judge, most_received
from longspan.planning.cost import peak_bytes, received_bytes
from longspan.planning.kernel_memory import about_kernel, table_limit, why_not
from longspan.planning.machine import Machine
from longspan.planning.planners import Scheme, scheme
from longspan.planning.problem import Problem
from longspan.planning.steps import Piece, Schedule, Sizes, Step

MAX_PLANS = 16
"""Number of plans that a mask with a function caches."""


X = TypeVar("X")


class BatchPart(dict[str, Any]):
    """Type of `plan.shard(batch, rank)` for type checkers. At run time it is a `longspan.training.Batch`."""

    def to(self, *args: Any, **options: Any) -> BatchPart: ...


class ShardCall(Protocol):
    """Type of `plan.shard`."""

    @overload
    def __call__(self, batch: Mapping[str, Any], rank: int, **options: Any) -> BatchPart: ...

    @overload
    def __call__(self, batch: X, rank: int, dim: int = 0, fill: float = 0) -> X: ...


@opaque
@dataclass(frozen=True, eq=False, repr=False)
class Plan(Handled):
    """Mask + layout + schedule: a frozen value with a fingerprint, a text form and reasons. Make one with `plan`."""

    mask: Mask
    layout: Layout
    sizes: Sizes
    dtype: str
    scheme: Scheme
    machine: Machine
    machine_assumed: bool
    keep: bool
    is_auto: bool = False
    """Whether the scheme was chosen, not named."""

    shard: ClassVar[ShardCall]
    """`plan.shard(batch, rank, ...)`: the rank's part of a batch, as `longspan.training.shard_batch` cuts it with the
    plan's layout; `plan.shard(x, rank, dim=0)`: the rank's part of one tensor, as `Layout.shard` cuts it."""
    prepare: ClassVar[Callable[..., None]]
    """`plan.prepare(rank, device)`: do now what the first call would do; see `longspan.training.prefetch`."""

    def check(self, *cut: Any) -> None:
        """Raise unless each argument was cut by a layout that puts every token where the plan has it.

        Arguments are batches of `shard_batch`, tensors of such a batch or of `Layout.shard`, plans or layouts.

        >>> import longspan as ls
        >>> sizes = {"q_heads": 2, "kv_heads": 2, "head_dim": 8, "dtype": "float32"}
        >>> plan = ls.plan(ls.masks.causal(8), ls.layouts.zigzag(8, 2), **sizes)
        >>> plan.check(ls.layouts.zigzag(8, 2))
        >>> plan.check(ls.layouts.contiguous(8, 2))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        longspan.errors.PlanError: the plan is over <layout zigzag, 8 tokens on 2 ranks>, but the tokens were cut by ...
        """
        for value in cut:
            known = value if isinstance(value, Layout) else getattr(value, "layout", None)
            known = known if isinstance(known, Layout) else getattr(carried_layout_of(value), "layout", None)
            if known is None:
                raise PlanError(
                    f"plan.check takes batches, tensors or plans with a known layout, but got {type(value).__name__}"
                    f" without one. Pass the batch that shard_batch returned (a copy as a plain dict loses its layout),"
                    f" or its layout."
                )
            is_same_size = (known.seq_len, known.world_size) == (self.layout.seq_len, self.layout.world_size)
            if not is_same_size or other_tokens(known, self.layout):
                raise PlanError(
                    f"the plan is over {self.layout}, but the tokens were cut by {known}, which has other tokens in its"
                    f" slots. Cut the batch with plan.shard(batch, rank, ...), or plan over the layout that cut it."
                )

    @cached_property
    def reasons(self) -> tuple[Reason, ...]:
        """The costs of every compared scheme, the chosen one first; one entry if the scheme was named."""
        return self.compared or (self.chosen,)

    @cached_property
    def compared(self) -> tuple[Reason, ...]:
        """`reasons` if the scheme was chosen; () if it was named."""
        return compare(self.chosen, self.scheme, self.machine, keep=self.keep) if self.is_auto else ()

    @cached_property
    def _steps(self) -> dict[int, tuple[tuple[Step, ...], tuple[Step, ...], tuple[Piece, ...]]]:
        return {}

    def _rank(self, rank: int) -> tuple[tuple[Step, ...], tuple[Step, ...], tuple[Piece, ...]]:
        if rank not in self._steps:
            forward = self.scheme.steps(rank)
            self._steps[rank] = (forward, *reverse(forward, rank, keep=self.keep))
        return self._steps[rank]

    def steps(self, rank: int, direction: str = "forward") -> tuple[Step, ...]:
        """Return the steps of one rank."""
        if direction not in ("forward", "backward"):
            raise PlanError(f"direction must be 'forward' or 'backward', but got {direction!r}.")
        forward, backward, _ = self._rank(rank)
        return forward if direction == "forward" else backward

    def kept(self, rank: int) -> tuple[Piece, ...]:
        """Return the remote pieces that the rank keeps from forward to backward."""
        return self._rank(rank)[2]

    def schedule(self, direction: str = "forward") -> Schedule:
        """Return every rank's steps, written out: for validation, plots and small numbers of ranks."""
        ranks = range(self.layout.world_size)
        steps = tuple(self.steps(rank, direction) for rank in ranks)
        kept = tuple(self.kept(rank) for rank in ranks) if direction == "backward" else ()
        return Schedule(self.scheme.name, direction, self.layout, self.sizes, steps, kept)

    @cached_property
    def imbalance(self) -> float:
        """The busiest rank's pairs over the mean; 1.0 is perfect.

        Pairs are the allowed ones. Where a function decides, they are those of all blocks of 128 x 128 that hold an
        allowed one, which kernels compute whole: counted up to 4,096 tokens, beyond that sampled, with an error.
        """
        work = self.scheme.work
        return float(work.max() / work.mean()) if work.any() else 1.0

    @cached_property
    def imbalance_error(self) -> float:
        """Three standard errors of `imbalance` if it was sampled, by the jackknife over sampled rows; else 0."""
        work = self.scheme.work
        return 3.0 * float(np.sqrt(self.scheme.work_variance.max()) / work.mean()) if work.any() else 0.0

    @cached_property
    def about_imbalance(self) -> str:
        """What `imbalance` is a figure of, and whether it was sampled."""
        planes = self.mask.distinct_planes()
        works = [work for plane in planes if (work := block_work(plane)) is not None]
        if not works:
            return "most pairs on a rank / mean"
        sampled = any(not work.is_counted for work in works)
        return "most work on a rank / mean; " + (
            f"sampled, ± {self.imbalance_error:.3f}" if sampled else "counted in blocks of 128"
        )

    def bytes_received(self, rank: int, direction: str = "forward") -> int:
        """Return the bytes that the rank receives in one pass."""
        return received_bytes(self.steps(rank, direction), rank, self.sizes)

    def peak_bytes(self, rank: int) -> int:
        """Return the most memory that the rank needs at any step beyond its own q, k, v, results and gradients."""
        forward, backward, kept = self._rank(rank)
        return max(
            peak_bytes(forward, rank, self.layout, self.sizes, "forward"),
            peak_bytes(backward, rank, self.layout, self.sizes, "backward", kept),
        )

    def workspace_bytes(self, rank: int, *, deterministic: bool = False) -> int | None:
        """Return the bytes of the kernel's workspace on the machine, and of the plan's tables on the device.

        `deterministic`: under `torch.use_deterministic_algorithms`. None if the kernel's workspace is not known.
        """
        forward, backward, _ = self._rank(rank)
        return device_bytes(forward, backward, self.sizes, self.machine, deterministic=deterministic)

    @property
    def kernel_assumed(self) -> str:
        """The kernel that predictions are for, and why a call would run another one, if it would.

        >>> import longspan as ls
        >>> sizes = {"q_heads": 8, "kv_heads": 2, "head_dim": 64, "dtype": "bfloat16"}
        >>> ls.plan(ls.masks.causal(64), ls.layouts.zigzag(64, 4), **sizes).kernel_assumed
        "FA2, PyTorch's own flash attention"
        """
        why = why_not(self.machine.kernel, self.sizes, functions=not self.mask.is_structured)
        other = "" if why is None else f"; but {why}, so another kernel would run, and predictions are not for that"
        return about_kernel(self.machine.kernel) + other

    @property
    def predicted_seconds(self) -> float:
        """Forward and backward of one attention on `machine`, simulated on all ranks."""
        return self.chosen.seconds

    @cached_property
    def chosen(self) -> Reason:
        """The costs of the scheme; `reasons` compares it with the others."""
        return replace(judge(self.scheme, self.machine, keep=self.keep), chosen=True)

    @cached_property
    def fingerprint(self) -> str:
        """A hex digest of everything that decides the messages, which ranks compare."""
        problem = self.scheme.problem
        parts = (self.layout.fingerprint, self.sizes.text(), self.dtype, self.scheme.name)
        text = f"{' '.join(parts)} {problem.node} {problem.max_rows} {self.keep}"
        return hashlib.sha256(f"{self.mask.fingerprint} {text}".encode()).hexdigest()

    @cached_property
    def is_structured(self) -> bool:
        """Whether the mask has no function: every pair is decided in closed form."""
        return self.mask.is_structured

    def __repr__(self) -> str:
        return f"<plan {self.scheme.name} of {self.mask} over {self.layout}, {self.fingerprint[:12]}>"

    def __str__(self) -> str:
        sizes, chosen = self.sizes, self.chosen
        heads = f"{sizes.q_heads}:{sizes.kv_heads} heads of {sizes.head_dim}"
        if sizes.v_head_dim != sizes.head_dim:
            heads += f"/{sizes.v_head_dim}"
        assumed = " (assumed: pass machine=)" if self.machine_assumed else ""
        inside = "internal memory of kernels, which is not known"
        if chosen.workspace_bytes is not None:
            inside = f"{bytes_text(chosen.workspace_bytes)} of kernels and tables"
        lines = [
            f"plan {self.fingerprint[:12]}: {self.scheme.name}",
            f"  mask       {self.mask}",
            f"  layout     {self.layout}",
            f"  tensors    {heads}, {self.dtype}, batch {sizes.batch}",
            f"  imbalance  {self.imbalance:.3f} ({self.about_imbalance})",
            f"  remote K/V {'kept for backward' if self.keep else 'fetched again in backward'}",
            f"  machine    {self.machine.name}{assumed}; times are simulated",
            f"  kernel     {self.kernel_assumed}",
            f"  scheme     {self._why()}",
            f"  predicted  {chosen.forward_seconds * 1e3:.3f} ms forward,"
            f" {chosen.backward_seconds * 1e3:.3f} ms backward",
            f"  memory     {bytes_text(chosen.peak_bytes)} at the peak + {inside}, beyond own tensors;"
            f" tables of all plans at most {bytes_text(table_limit())}",
            f"compared ({len(self.reasons)}; bytes are the most of any rank, both passes; peaks are of ranks likely to"
            " be busiest):",
            REASON_HEAD,
        ]
        return "\n".join((*lines, *map(str, self.reasons)))

    def _why(self) -> str:
        """Return why the scheme was chosen."""
        if not self.is_auto:
            return f"{self.scheme.name}, as named"
        gathered = most_received(scheme("all_gather", self.scheme.problem), keep=self.keep)
        most = bytes_text(self.chosen.bytes_received)
        said = f"{most} at the busiest rank, {bytes_text(gathered)} with an all-gather"
        faster = [r for r in self.reasons if not r.at_least and r.seconds < (1 - TIE) * self.chosen.seconds]
        if not faster:
            return f"{self.scheme.name} is predicted fastest; {said}"
        gain = self.chosen.seconds / faster[0].seconds - 1
        why = f"{faster[0].scheme} is predicted {gain:.1%} faster, but receives more than an all-gather"
        return f"{self.scheme.name}: {why}; {said}"


@dataclass(frozen=True)
class PlanRequest:
    """The checked arguments of a plan other than its mask."""

    layout: Layout
    sizes: Sizes
    dtype: str
    scheme: str
    machine: Machine
    assumed: bool
    """Whether the machine is the default."""
    keep: bool = False
    max_rows: int | None = None


def build_plan(mask: Mask, request: PlanRequest) -> Plan:
    """Return the plan of a request. Equal requests get the same object; for a mask with a function, only with the same
    mask object, which owns its plans, so that they are freed with it and with what its function captured."""
    if mask.is_structured:
        return _build_plan(MaskKey(mask), request)
    if request not in mask.plans:
        keep_few(mask.plans)[request] = _build_plan.__wrapped__(MaskKey(mask.twin()), request)
    return mask.plans[request]


def keep_few(plans: dict[Any, Any]) -> dict[Any, Any]:
    """Drop the oldest plans of a mask if there are too many, and return the others."""
    while len(plans) >= MAX_PLANS:
        del plans[next(iter(plans))]
    return plans


@lru_cache(maxsize=64)
def _build_plan(key: MaskKey, request: PlanRequest) -> Plan:
    layout, machine = request.layout, request.machine
    mask = key.mask.resized(layout.seq_len)
    problem = Problem.make(mask, layout, request.sizes, node=machine.node, max_rows=request.max_rows)
    is_auto = request.scheme == "auto"
    chosen = choose(problem, machine, keep=request.keep) if is_auto else scheme(request.scheme, problem)
    return Plan(mask, layout, request.sizes, request.dtype, chosen, machine, request.assumed, request.keep, is_auto)
