"""Memory that kernels allocate beyond their results, and the shapes that each kernel accepts.

A launch works on `rows` query rows and `cols` key rows of one batch row, in `slices`, for `q_heads` query heads and
`kv_heads` key heads of `width` features (padded equally for q, k and v). If it takes only part of the rows, q, k and v
are packed first. In forward, FA3 and FA4 allocate no more than that and their results: `num_splits=1` keeps them from
splitting keys over partial results. FA2 has no such argument for a single slice, and splits its keys if there are fewer
than 1.6 * SMs blocks of 64 rows, over batch and heads: up to 0.2 GB, not counted. In backward, buffers have the rows of
one slice rounded up to 128, or of several slices plus 128 for each, and hold:

    FA2         dq of all query heads in float32, ceil(SMs / (batch * slices * heads)) times where algorithms must be
                deterministic; row sums; dk and dv of all query heads, before they are added up over groups; copies of
                out and its gradient, which it takes only contiguous, and of lse
    FA3, FA4    dq in float32; row sums and lse in base 2; dk and dv in float32 where heads are grouped
    flex        row sums and lse in base 2
    cuDNN       decided by the library: unknown
    cpu_flash   blocks of scores, a few MB a thread: not counted

From the sources: PyTorch's flash_api.cpp and attention_backward.cu, FlashAttention's hopper/flash_api.cpp and
flash_attn/cute/interface.py, torch/_inductor/kernel/flex.

FA2 on one slice of 1,000 rows and keys, 8 query heads on 2 key heads, width 64, bfloat16: its buffers have 1,024 rows.
dq takes 1,024 * 8 * 64 * 4 = 2,097,152 bytes, row sums 1,024 * 8 * 4 = 32,768, dk and dv 2 * 1,000 * 8 * 64 * 2 =
2,048,000, out and its gradient as much, lse 1,000 * 8 * 4 = 32,000: 6,257,920 in all.

>>> launch = LaunchShape(rows=1000, cols=1000, slices=1, q_heads=8, kv_heads=2, batch=1, packed=0, width=64, itemsize=2)
>>> workspace_of("FA2", launch, "backward", multiprocessors=132)
6257920
>>> workspace_of("FA2", launch, "backward", multiprocessors=132, deterministic=True) - 6257920 == 16 * 2097152
True
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from longspan.errors import PlanError
from longspan.planning.cost import BATCH, KV_HEADS, KV_TOKENS, Q_HEADS, Q_TOKENS, bands_of, launch_table, sides
from longspan.planning.machine import Machine
from longspan.planning.steps import Role, Sizes, Step
from longspan.spans import check_int

TABLE_LIMIT = 64 << 20
_table_limit = TABLE_LIMIT


def table_limit() -> int:
    """Return the most bytes of tables of runs, of all plans together, that stay on a GPU."""
    return _table_limit


def set_table_limit(num_bytes: int = TABLE_LIMIT) -> None:
    """Set the most bytes of tables of runs, of all plans together, that stay on a GPU.

    The tables of a plan that were dropped are copied to the GPU again at the plan's next call.
    """
    global _table_limit
    _table_limit = check_int(num_bytes, "num_bytes", "set_table_limit()", PlanError)


BLOCK = 128
"""Flash attention rounds the rows of its buffers up to this."""


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """The size of one launch; rows, keys and slices are of one batch row."""

    rows: int
    cols: int
    slices: int
    q_heads: int
    kv_heads: int
    batch: int
    packed: int
    """1: q, k and v are packed for it; 0: it reads them in place."""
    width: int
    itemsize: int

    def padded_rows(self, rows: int) -> int:
        """Return the rows of all batch rows in a float32 buffer."""
        return self.batch * (_up(rows, BLOCK) if self.slices == 1 else rows + BLOCK * self.slices)


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _fa2(launch: LaunchShape, splits: int) -> int:
    wide = _up(launch.width, 32 if launch.width <= 128 else 64)
    rows, cols = launch.batch * launch.rows, launch.batch * launch.cols
    sums = launch.padded_rows(launch.rows) * launch.q_heads * (splits * wide + 1) * 4
    grouped = 2 * cols * launch.q_heads * launch.width * launch.itemsize
    is_copied = launch.q_heads > 1 or launch.slices > 1  # a single head is contiguous
    copies = rows * launch.q_heads * (2 * launch.width * launch.itemsize * is_copied + 4)
    return sums + (grouped if launch.q_heads != launch.kv_heads else 0) + copies


def _fa3(launch: LaunchShape, splits: int) -> int:  # noqa: ARG001 (deterministic: semaphores, a few bytes)
    wide = _up(launch.width, 32)
    sums = launch.padded_rows(launch.rows) * launch.q_heads * (wide + 2) * 4
    grouped = 2 * launch.padded_rows(launch.cols) * launch.kv_heads * wide * 4
    return sums + (grouped if launch.q_heads != launch.kv_heads else 0)


def _flex(launch: LaunchShape, splits: int) -> int:  # noqa: ARG001
    return launch.batch * launch.rows * launch.q_heads * 2 * 4


@dataclass(frozen=True, slots=True)
class KernelFacts:
    """A kernel's name for messages, its limits, and its workspace in backward (None: not known)."""

    about: str
    half_only: bool = True
    widest: int = 256
    functions: bool = False
    """Whether it supports mask functions."""
    workspace: Callable[[LaunchShape, int], int] | None = None


KERNELS = {
    "FA2": KernelFacts("FA2, PyTorch's own flash attention", workspace=_fa2),
    "FA3": KernelFacts("FA3, which has to be installed", workspace=_fa3),
    "FA4": KernelFacts("FA4, which has to be installed", widest=128, workspace=_fa3),
    "cuDNN": KernelFacts('cuDNN, which has to be named: kernel="cudnn"', widest=128),
    "flex": KernelFacts("flex attention, compiled by Triton", half_only=False, functions=True, workspace=_flex),
    "cpu_flash": KernelFacts(
        "PyTorch's flash attention on CPUs",
        half_only=False,
        widest=1 << 30,
        functions=True,
        workspace=lambda _launch, _splits: 0,
    ),
}


def about_kernel(kernel: str) -> str:
    """Describe the kernel of a machine in words.

    >>> about_kernel("FA2"), about_kernel("")
    ("FA2, PyTorch's own flash attention", 'a kernel that the machine does not name')
    """
    return KERNELS[kernel].about if kernel in KERNELS else kernel or "a kernel that the machine does not name"


def why_not(kernel: str, sizes: Sizes, *, functions: bool) -> str | None:
    """Return why a call with these tensors would run another kernel than the machine's, or None.

    >>> why_not("FA2", Sizes(8, 2, 64, 64, itemsize=4), functions=False)
    'FA2 takes bfloat16 and float16, and these tensors have 4 bytes an element'
    """
    if kernel not in KERNELS:
        return None
    facts, widest = KERNELS[kernel], max(sizes.head_dim, sizes.v_head_dim)
    if facts.half_only and sizes.itemsize != 2:
        return f"{kernel} takes bfloat16 and float16, and these tensors have {sizes.itemsize} bytes an element"
    if widest > facts.widest:
        return f"{kernel} takes heads of up to {facts.widest} features, and these have {widest}"
    if functions and not facts.functions:
        return f"{kernel} runs no functions, and the mask has one: on a GPU that is flex's work"
    return None


def workspace_of(
    kernel: str, launch: LaunchShape, direction: str, multiprocessors: int, *, deterministic: bool = False
) -> int | None:
    """Return the bytes that a launch allocates beyond its results, or None if not known."""
    facts = KERNELS.get(kernel)
    if facts is None or facts.workspace is None:
        return None
    rows = launch.rows * launch.q_heads + 2 * launch.cols * launch.kv_heads
    packed = launch.packed * launch.batch * rows * launch.width * launch.itemsize
    if direction == "forward":
        return packed
    slices = launch.batch * launch.slices
    splits = -(-multiprocessors // (slices * launch.q_heads)) if deterministic else 1
    return packed + facts.workspace(launch, splits)


# -- Workspace of a plan's launches, and tables of runs ----------------------------------------------------------------
# `cost.py` does not count this memory. A launch's workspace exists while it runs, so a pass needs that of its largest
# launch. Tables list the runs of rows that are packed, gathered and added: one line for every run of every tensor of a
# piece that is sent, received or computed on, whatever its tokens and heads. All plans together keep `table_limit()`.


LINE_BYTES = 80
TENSORS = {Role.Q: 1, Role.KV: 2, Role.OUT: 2, Role.DOUT: 3, Role.DQ: 1, Role.DKV: 2}
VECTOR = 8
"""GPU kernels read this many features at once: heads are padded to a multiple of it."""


def largest_launches(steps: tuple[Step, ...], sizes: Sizes) -> list[LaunchShape]:
    """Return the largest launch of every compute and window."""
    computes = [compute for step in steps for compute in step.computes]
    if not computes:
        return []
    side = sides(computes, sizes)
    table = launch_table(bands_of(computes), side)
    width = -(-max(sizes.head_dim, sizes.v_head_dim) // VECTOR) * VECTOR
    is_whole = (table.rows == side[table.compute, Q_TOKENS]) & (table.cols == side[table.compute, KV_TOKENS])
    packed = (~is_whole & (table.slices > 1)).astype(np.int64)
    heads = (side[table.compute, i] for i in (Q_HEADS, KV_HEADS, BATCH))
    columns = (table.rows, table.cols, table.slices, *heads, packed)
    rows = np.unique(np.stack(columns, axis=1), axis=0)
    return [LaunchShape(*row, width=width, itemsize=sizes.itemsize) for row in rows.tolist()]


def workspace_bytes(
    backward: tuple[Step, ...], sizes: Sizes, machine: Machine, *, deterministic: bool = False
) -> int | None:
    """Return the largest workspace of one launch, or None if it is not known for the machine's kernel.

    Backward has forward's launches, and needs more for each, so only its steps count.
    """
    if machine.kernel not in KERNELS or KERNELS[machine.kernel].workspace is None:
        return None
    if not machine.one_launch:  # a CPU's kernel takes tiles one by one, in place
        return 0
    workspaces = [
        workspace_of(machine.kernel, launch, "backward", machine.slots, deterministic=deterministic) or 0
        for launch in largest_launches(backward, sizes)
    ]
    return max(workspaces, default=0)


def table_bytes(forward: tuple[Step, ...], backward: tuple[Step, ...], machine: Machine) -> int:
    """Return the bytes of the tables of runs of a plan on a GPU; those on CPUs are not counted."""
    if not machine.one_launch:
        return 0
    moved = [t.piece for steps in (forward, backward) for step in steps for t in step.transfers]
    used = [piece for step in forward for compute in step.computes for piece in (compute.q, compute.kv)]
    lines = sum(TENSORS[piece.role] * len(piece.spans) for piece in (*moved, *used, *used))  # both passes compute
    return min(LINE_BYTES * lines, table_limit())
