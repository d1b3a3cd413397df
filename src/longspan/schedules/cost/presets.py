"""Machines that are known by name. Figures are published or measured as each `source` says; none was run on a GPU here.

The H100 shares (0.704 and 0.645 of peak), the 0.96 us per tile slot, 0.70 of memory bandwidth for copies, 0.874 of link
bandwidth and 25.5 us per operation were fitted to 24 published points; `python -m benchmarks.published` shows how well
they predict the other 24. The A100 borrows the last four, which nobody has checked there.
"""

from __future__ import annotations

from longspan.errors import PlanError
from longspan.schedules.cost.machine import Link, Machine, Tiling

_WIRE = 0.874
_LATENCY = 5e-6

H100 = Machine(
    name="h100",
    source="8 x H100 SXM per node: 989 TFLOP/s bf16, 132 SMs, 3.35 TB/s, NVLink 450 GB/s per direction (vendor data"
    " sheet); one 400 Gb/s InfiniBand card per GPU (assumed); shares fitted to the MagiAttention v1.1 charts",
    flops=989e12,
    forward_share=0.704,
    backward_share=0.645,
    slots=132,
    slot_seconds=0.96e-6,
    copy_bandwidth=0.703 * 3.35e12,
    op_seconds=25.5e-6,
    one_launch=True,
    links=(Link(8, 450e9 * _WIRE, _LATENCY), Link(1 << 30, 50e9 * _WIRE, 2 * _LATENCY)),
    forward_tiling=Tiling(128, 128, 176, packs_heads=True),
    backward_tiling=Tiling(128, 64, 80),
)

A100 = Machine(
    name="a100",
    source="8 x A100 80GB SXM per node: 312 TFLOP/s bf16, 108 SMs, 2.04 TB/s, NVLink 300 GB/s per direction, one"
    " 200 Gb/s card per GPU (vendor data sheet); forward share from the FlashAttention-2 paper, the rest borrowed from"
    " the H100 fit and unchecked",
    flops=312e12,
    forward_share=0.70,
    backward_share=0.60,
    slots=108,
    slot_seconds=0.96e-6,
    copy_bandwidth=0.703 * 2.039e12,
    op_seconds=25.5e-6,
    one_launch=True,
    links=(Link(8, 300e9 * _WIRE, _LATENCY), Link(1 << 30, 25e9 * _WIRE, 2 * _LATENCY)),
    forward_tiling=Tiling(128, 128, 128, packs_heads=True),
    backward_tiling=Tiling(128, 64, 64),
)

CPU = Machine(
    name="cpu",
    source="2 cores, one thread per rank, Gloo on loopback, bf16, PyTorch 2.13 (measured: flash operator 219 GFLOP/s"
    " forward and 0.41 of that backward, key blocks of 512, a window's far border masked, 15 us per call;"
    " point-to-point 2.25 GB/s, 110 us)",
    flops=219e9,
    forward_share=1.0,
    backward_share=0.41,
    slots=1,
    slot_seconds=0.0,
    copy_bandwidth=14e9,
    op_seconds=15e-6,
    one_launch=False,
    links=(Link(1 << 30, 2.25e9, 110e-6),),
    forward_tiling=Tiling(1, 512, 64, far_rows=1024, far_share=0.8),
    backward_tiling=Tiling(1, 512, 64, far_rows=1024, far_share=0.8),
)

MACHINES = {machine.name: machine for machine in (H100, A100, CPU)}


def machine_named(name: str) -> Machine:
    """The preset of that name."""
    if name not in MACHINES:
        raise PlanError(f"machine {name!r} was asked for. Choose one of {', '.join(MACHINES)}, or pass a Machine.")
    return MACHINES[name]
