"""Machines by name, one for each kernel that they may run. No preset was measured by running Longspan on a GPU.

`h100` is an H100 with the kernel that Longspan's `varlen` runs there: PyTorch's own flash attention, which is FA2,
unless another was activated by `torch.nn.attention.activate_flash_attention_impl`. Shares of peak are set so that the
model of tiles gives a bare kernel's published speed; `python -m benchmarks.kernels` shows how well, point by point.

    machine      kernel         published TFLOP/s, bf16, heads of 128     where
    h100         FA2 2.5.8      370 forward, 335 causal, 322 backward     FA3 paper, figures 5 and 6
    h100-fa3     FA3            616 causal forward, 561 backward (2024)   FA3 paper; shares are those of whole systems
                                                                          of 2025, 10% higher (MagiAttention v1.1)
    h100-cudnn   cuDNN 9.19     673 causal forward, 579 backward          cudnn-frontend, on an H200 (the same SMs)
    h100-flex    flex, Triton   FA2 x 1.25 forward, x 1.03 backward       PyTorch at GTC 2025
    a100         FA2            227 forward, 196 backward at most         FA2 paper (73% and 63% of peak)
    a100-flex    flex, Triton   FA2 x 0.90 forward, x 0.85 backward       PyTorch's post on FlexAttention
    b200         FA2, in 2.8    411 causal forward, 336 backward          cudnn-frontend
    b200-fa4     FA4 4.0.0b15   1,636 causal forward, 1,429 backward      cudnn-frontend, on a GB200 of 2.5 PFLOP/s
    b200-cudnn   cuDNN 9.10.2   1,332 causal forward, 1,075 backward      cudnn-frontend
    b200-flex    flex, Triton   FA4 / 2.4 forward, / 2.1 backward         PyTorch's post on flex with FA4 (1.6 to 3.2
                                                                          and 1.85 to 2.3)

FA4 runs on Hopper too; no published figure was found for it there, so there is no such machine.

Papers: FA2 arXiv:2307.08691, FA3 arXiv:2407.08608; FA4: together.ai/blog/flashattention-4 (1,605 at most on a B200).
Posts: pytorch.org/blog/flexattention, .../flexattention-flashattention-4-fast-and-flexible, .../pytorch-at-gtc-2025.
Measurements: benchmark/sdpa_benchmark_training of github.com/NVIDIA/cudnn-frontend, docs/source/blog/cp_benchmark.md of
github.com/SandAI-org/MagiAttention.

Links, and copies at 0.703 of memory bandwidth, are those of the fit to whole systems (`H100_FITTED`), unchecked on
other GPUs. An operation takes 3.8 us of the device: short kernels one after another, in NVIDIA's post on CUDA graphs
(developer.nvidia.com/blog/cuda-graphs). Hosts: 15 us for each operation, 5 us for each message, 150 us for each call;
set from what Longspan takes on CPUs with kernels that do nothing. `longspan calibrate` measures them where it runs.

Matrix products of layers, as a share of peak: 0.66 of what one product alone sustains, 755 TFLOP/s on an H100's SMs
(H200) and 1,429 on a B200, 271 at best on an A100 (compute/accelerator of github.com/stas00/ml-engineering, which also
has a training step of Llama-3.1-8B on H200s taken apart: the 0.66 is from it, `python -m benchmarks.published_models`).
Copies between device and host: 50 GB/s by PCIe 5, 25 by PCIe 4, assumed. A CPU's are not known here.
"""

from __future__ import annotations

from dataclasses import replace

from longspan.errors import PlanError
from longspan.planning.machine import Link, Machine, Tiling

_WIRE = 0.874
_COPIES = 0.703
_LATENCY = 5e-6
_OP_SECONDS = 3.8e-6
_TRITON = Tiling(128, 64, 64)

H100_FITTED = Machine(
    name="h100-fitted",
    source="8 x H100 SXM per node: 989 TFLOP/s bf16, 132 SMs, 3.35 TB/s, NVLink 450 GB/s per direction (vendor data"
    " sheet); one 400 Gb/s InfiniBand card per GPU (assumed); shares fitted to the MagiAttention v1.1 charts",
    flops=989e12,
    forward_share=0.704,
    backward_share=0.645,
    slots=132,
    slot_seconds=0.96e-6,
    copy_bandwidth=_COPIES * 3.35e12,
    op_seconds=25.5e-6,
    one_launch=True,
    links=(Link(8, 450e9 * _WIRE, _LATENCY), Link(1 << 30, 50e9 * _WIRE, 2 * _LATENCY)),
    forward_tiling=Tiling(128, 128, 176, packs_heads=True),
    backward_tiling=Tiling(128, 64, 80),
    kernel="FA3",
    matmul_share=0.66 * 755 / 989,
    host_bandwidth=50e9,
)
"""Whole published systems on H100s, their hosts within the 25.5 us of an operation: six constants fitted to 24 points,
which predict 24 others (`python -m benchmarks.published`). Our own runs are priced on the machines below."""


def _with_host(machine: Machine, **changes: object) -> Machine:
    """The machine with what Longspan's own operations cost device and host."""
    costs = {"op_seconds": _OP_SECONDS, "launch_seconds": 15e-6, "message_seconds": 5e-6, "call_seconds": 150e-6}
    return replace(machine, **{**costs, **changes})


_H100 = "8 x H100 SXM per node, links and copies as in the published fit; "
_SHEET_B200 = (
    "8 x B200 per node: 2,250 TFLOP/s bf16, 148 SMs, 8 TB/s, NVLink 900 GB/s per direction (vendor data sheet); one 400"
    " Gb/s card per GPU (assumed); "
)
_SHEET_A100 = (
    "8 x A100 80GB SXM per node: 312 TFLOP/s bf16, 108 SMs, 2.04 TB/s, NVLink 300 GB/s per direction, one 200 Gb/s card"
    " per GPU (vendor data sheet); "
)

H100 = _with_host(
    H100_FITTED, name="h100", kernel="FA2", forward_share=0.37, backward_share=0.32, slot_seconds=2.6e-6,
    forward_tiling=Tiling(128, 64, 64), backward_tiling=Tiling(128, 64, 64),
    source=_H100 + "FA2 as PyTorch has it, from figures 5 and 6 of the FlashAttention-3 paper",
)  # fmt: skip
H100_FA3 = _with_host(
    H100_FITTED, name="h100-fa3", kernel="FA3",
    source=_H100 + "FA3 kernels fitted to the MagiAttention v1.1 charts",
)  # fmt: skip
H100_CUDNN = _with_host(
    H100_FITTED, name="h100-cudnn", kernel="cuDNN", forward_share=0.72, backward_share=0.58, slot_seconds=4e-6,
    forward_tiling=Tiling(128, 128, 128), backward_tiling=Tiling(128, 64, 64),
    source=_H100 + "cuDNN 9.19 as NVIDIA measured it on an H200, which has the same SMs (cudnn-frontend)",
)  # fmt: skip
H100_FLEX = replace(
    H100, name="h100-flex", kernel="flex", forward_share=1.25 * 0.37, backward_share=1.03 * 0.32,
    forward_tiling=_TRITON, backward_tiling=_TRITON,
    source=_H100 + "flex by Triton: 1.25 and 1.03 times FA2, as PyTorch said at GTC 2025",
)  # fmt: skip
A100 = replace(
    H100, name="a100", kernel="FA2", flops=312e12, forward_share=0.70, backward_share=0.60, slots=108,
    copy_bandwidth=_COPIES * 2.039e12,
    links=(Link(8, 300e9 * _WIRE, _LATENCY), Link(1 << 30, 25e9 * _WIRE, 2 * _LATENCY)),
    matmul_share=0.66 * 271 / 312, host_bandwidth=25e9,
    source=_SHEET_A100 + "FA2 from its paper; links and copies borrowed from the H100 fit and unchecked",
)  # fmt: skip
A100_FLEX = replace(
    A100, name="a100-flex", kernel="flex", forward_share=0.90 * 0.70, backward_share=0.85 * 0.60,
    forward_tiling=_TRITON, backward_tiling=_TRITON,
    source=_SHEET_A100 + "flex by Triton: 0.90 and 0.85 times FA2, from PyTorch's post on FlexAttention",
)  # fmt: skip
B200 = replace(
    H100, name="b200", kernel="FA2", flops=2250e12, forward_share=0.183, backward_share=0.15, slots=148,
    slot_seconds=4e-6, copy_bandwidth=_COPIES * 8e12,
    links=(Link(8, 900e9 * _WIRE, _LATENCY), Link(1 << 30, 50e9 * _WIRE, 2 * _LATENCY)),
    matmul_share=0.66 * 1429 / 2250,
    source=_SHEET_B200 + "FA2 of PyTorch 2.8 as NVIDIA measured it on a B200 (cudnn-frontend)",
)  # fmt: skip
B200_FA4 = replace(
    B200, name="b200-fa4", kernel="FA4", forward_share=0.67, backward_share=0.55,
    forward_tiling=Tiling(256, 128, 128), backward_tiling=Tiling(128, 128, 128),
    source=_SHEET_B200 + "FA4 4.0.0b15 as NVIDIA measured it on a GB200 (cudnn-frontend)",
)  # fmt: skip
B200_CUDNN = replace(
    B200_FA4, name="b200-cudnn", kernel="cuDNN", forward_share=0.62, backward_share=0.48,
    source=_SHEET_B200 + "cuDNN 9.10.2 as NVIDIA measured it on a B200 (cudnn-frontend)",
)  # fmt: skip
B200_FLEX = replace(
    B200, name="b200-flex", kernel="flex", forward_share=0.67 / 2.4, backward_share=0.55 / 2.1,
    forward_tiling=_TRITON, backward_tiling=_TRITON,
    source=_SHEET_B200 + "flex by Triton: FA4 takes 1/2.4 of its time forward, 1/2.1 backward (PyTorch's post)",
)  # fmt: skip

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
    kernel="cpu_flash",
)

MACHINES = {
    machine.name: machine
    for machine in (
        H100, H100_FA3, H100_CUDNN, H100_FLEX, A100, A100_FLEX, B200, B200_FA4, B200_CUDNN, B200_FLEX, CPU,
    )
}  # fmt: skip


def machine_named(name: str) -> Machine:
    """The preset of that name."""
    if name not in MACHINES:
        raise PlanError(f"machine {name!r} was asked for. Choose one of {', '.join(MACHINES)}, or pass a Machine.")
    return MACHINES[name]


def assumed_machine(*, functions: bool) -> Machine:
    """The H100 that is taken where no machine was named, with the kernel that would run there.

    >>> assumed_machine(functions=False).kernel, assumed_machine(functions=True).kernel
    ('FA2', 'flex')
    """
    return H100_FLEX if functions else H100


def nearest(major: int, kernel: str) -> Machine:
    """The preset for a GPU of this compute capability and kernel, or for PyTorch's own on the GPU that is nearest.

    >>> nearest(9, "FA3").name, nearest(8, "FA4").name, nearest(12, "FA2").name
    ('h100-fa3', 'a100', 'b200')
    """
    gpu = "a100" if major < 9 else "h100" if major == 9 else "b200"
    return MACHINES.get(f"{gpu}-{kernel.lower()}", MACHINES[gpu])
