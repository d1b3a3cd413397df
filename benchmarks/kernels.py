"""`python -m benchmarks.kernels`: compare the published speed of bare kernels with the machine presets.

Nothing ran on a GPU here: figures are read from the sources that `longspan.planning.machine` names, all bfloat16 or
float16, heads of 128. The command fails if the model is more than 15% off at 8,192 tokens or more, where context
parallelism begins. Shorter ones are only shown: the model has one time for the beginning and end of a tile, forward and
backward, and is too fast for short backward passes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from longspan.masks.bands import LIMIT
from longspan.planning.machine import B200, B200_CUDNN, B200_FA4, H100, H100_CUDNN, H100_FA3, Machine, Work, tile_work

DIM = 128
LONG = 8192
MAX_ERROR = 0.15
GB200_FA4 = replace(B200_FA4, name="gb200-fa4", flops=2500e12)
"""The GPU of the published run: as B200, with more power and clock."""


@dataclass(frozen=True, slots=True)
class KernelPoint:
    """One published figure: TFLOP/s of a bare kernel."""

    machine: Machine
    tokens: int
    heads: tuple[int, int]
    batch: int
    causal: bool
    direction: str
    tflops: float

    def predicted(self) -> float:
        """Return TFLOP/s of the model's kernel alone: no copies, no launches."""
        band = np.array([[0, self.tokens, 0, self.tokens, 0 if self.causal else -LIMIT, LIMIT]], dtype=np.int64)
        one = tile_work(band, *self.heads, 2 * DIM, self.machine, self.direction)
        work = Work(self.batch * one.flop, self.batch * one.slots)
        flop = 4.0 * self.tokens**2 * DIM * self.heads[0] * self.batch * (0.5 if self.causal else 1.0)
        flop *= 1.0 if self.direction == "forward" else 2.5
        return flop / work.seconds(self.machine, self.direction) / 1e12

    @property
    def error(self) -> float:
        return self.predicted() / self.tflops - 1


Curve = tuple[Machine, tuple[int, int], bool, str, int, Sequence[float]]
"""Machine, heads, causal, direction, the first number of tokens (each next is twice that), TFLOP/s."""

# FA3 paper, figures 5 and 6: 16 heads, 16k tokens in all
PAPER: tuple[Curve, ...] = (
    (H100, (16, 16), False, "forward", 512, (309, 350, 362, 368, 370, 370)),
    (H100, (16, 16), True, "forward", 512, (191, 260, 298, 319, 333, 335)),
    (H100, (16, 16), False, "backward", 512, (214, 260, 291, 310, 318, 322)),
    (H100_FA3, (16, 16), False, "forward", 512, (467, 565, 625, 638, 646, 648)),
    (H100_FA3, (16, 16), True, "forward", 512, (292, 423, 521, 579, 602, 616)),
    (H100_FA3, (16, 16), False, "backward", 512, (316, 424, 501, 542, 559, 561)),
)
# NVIDIA/cudnn-frontend, benchmark/sdpa_benchmark_training: artifacts/sdpa_bf16_benchmark_results_NVIDIA_B200.csv,
# results/h200_919_only_cudnn/llama3.1_20260227_034703.csv, results/llama3.1/gb200/llama3.1_20260529_180853.csv
NVIDIA: tuple[Curve, ...] = (
    (H100_CUDNN, (64, 8), True, "forward", 2048, (484, 591, 644, 673, 688)),
    (H100_CUDNN, (64, 8), True, "backward", 2048, (370, 474, 541, 579, 581)),
    (H100_CUDNN, (64, 8), False, "forward", 2048, (633, 671, 691, 702, 693)),
    (H100_CUDNN, (64, 8), False, "backward", 2048, (504, 560, 594, 612, 572)),
    (B200, (128, 8), True, "forward", 2048, (242, 325, 373, 394, 404, 409, 411)),
    (B200, (128, 8), True, "backward", 2048, (186, 256, 299, 320, 331, 335, 336)),
    (B200_CUDNN, (128, 8), True, "forward", 2048, (479, 856, 1171, 1332, 1419, 1382, 1355)),
    (B200_CUDNN, (128, 8), True, "backward", 2048, (371, 701, 943, 1075, 1109, 1073, 1048)),
    (GB200_FA4, (64, 8), True, "forward", 4096, (1330, 1518, 1636, 1529)),
    (GB200_FA4, (64, 8), True, "backward", 4096, (1133, 1346, 1429, 1267)),
    (GB200_FA4, (64, 8), False, "forward", 4096, (1538, 1686, 1663, 1470)),
    (GB200_FA4, (64, 8), False, "backward", 4096, (1391, 1380, 1402, 1313)),
)


def points() -> Iterator[KernelPoint]:
    for curves, batch_of in ((PAPER, lambda tokens: 16384 // tokens), (NVIDIA, lambda _: 1)):
        for machine, heads, causal, direction, first, values in curves:
            for i, tflops in enumerate(values):
                tokens = first << i
                yield KernelPoint(machine, tokens, heads, batch_of(tokens), causal, direction, tflops)


def main() -> int:
    wrong = 0
    for point in points():
        missed = point.tokens >= LONG and abs(point.error) > MAX_ERROR
        wrong += missed
        mask = "causal" if point.causal else "full"
        print(
            f"{point.machine.name:12} {point.machine.kernel:6} {point.direction:8} {mask:6} {point.tokens:7,} tokens:"
            f" published {point.tflops:6,.0f}, model {point.predicted():6,.0f} TFLOP/s, {point.error:+7.1%}"
            f"{'  MISSED' if missed else ''}"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
