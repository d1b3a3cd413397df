"""`python -m benchmarks.recommend`: what `longspan plan --gpus` recommends, its search time, and published lengths.

Twelve models at three lengths, each searched within `MAX_SECONDS` of processor time; then runs whose length and number
of GPUs were published: does the recommendation fit there, and where it does not, what is held at each moment. Recipes
of others were READ in their sources. All memory and times of ours are COMPUTED; nothing ran on a GPU. The command fails
if a search takes longer, or if a run that was measured to fit with the same means does not.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace

from benchmarks.published_runs import K, M
from longspan.formatting import bytes_text, seconds_text
from longspan.planning.machine import GPU_MEMORY, machines_of_gpu
from longspan.sizing import StepMemory, built_in_config, sizes_of
from longspan.sizing.recommend import Configuration, Recommendation, Request, recommend, thriftiest

MAX_SECONDS = 5.0
LENGTHS = (32 * K, 256 * K, M)
MODELS = {  # GPUs
    "llama3-8b": 8, "llama3-70b": 64, "qwen3-8b": 8, "qwen3-32b": 64, "qwen3-30b-a3b": 64, "mixtral-8x7b": 64,
    "gemma3-27b": 64, "gpt-oss-20b": 16, "gpt-oss-120b": 128, "deepseek-v3": 256, "qwen3-next-80b-a3b": 128,
    "nemotron-h-8b": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Published:
    """A length that was published for a model on H100s, and the means."""

    source: str
    model: str
    tokens: int
    gpus: int
    means: str
    judged: bool
    """Whether not fitting is an error: the means are those that the command knows."""
    memory: int = 80
    tp: int = 1
    batch: int = 1


ALST = "ALST (arXiv:2506.13996; ArcticTraining, projects/sequence-parallelism/run-h100-sp*-llama-8b.yml)"
TITAN = "torchtitan (benchmarks/llama3_h100_202412_torchtitan.md)"
_ALST_MEANS = "Ulysses, ZeRO-3, optimizer and checkpoints on the host, MLP and loss in tiles, FA2"
_TITAN_MEANS = "FSDP2, CP {}, full checkpointing, torch.compile, Float8; 84 GiB of 96 GB"
RUNS = (
    Published("TRL, guide to 1M tokens", "qwen3-8b", M, 8, "ring, FSDP2, checkpoints on the host", judged=True),
    Published(ALST, "llama3-8b", 500_000, 1, f"{_ALST_MEANS}; weights on the host", judged=True),
    Published(ALST, "llama3-8b", 3_700_000, 8, _ALST_MEANS, judged=True),
    Published(ALST, "llama3-8b", 15_000_000, 32, _ALST_MEANS, judged=True),
    *(Published(TITAN, "llama3-8b", n * 32 * K, 8, _TITAN_MEANS.format(n), True, memory=96) for n in (1, 2, 4, 8)),
    Published(
        TITAN,
        "llama3-70b",
        8 * K,
        256,
        "FSDP 32, TP 8, batch of 16, full checkpointing, compile, Float8; 71.9 GiB",
        judged=True,
        memory=96,
        tp=8,
        batch=16,
    ),
)


def request_of(model: str, tokens: int, gpus: int, gpu: str = "h100") -> Request:
    """Return the request for a built-in model."""
    return Request(sizes_of(built_in_config(model)), tokens, gpus, machines_of_gpu(gpu), GPU_MEMORY[gpu])


def text_of(one: Configuration) -> str:
    """Return a configuration in a line."""
    schemes = "/".join(dict.fromkeys(one.schemes)) or "none"
    schemes += "" if one.fetch_bytes is None else f" with K/V of {bytes_text(one.fetch_bytes)}"
    bound = "> " * one.time.at_least
    split = f" x tp {one.tp}" * (one.tp > 1) + f" x ep {one.ep}" * (one.ep > 1)
    return (
        f"{one.data_parallel} x {one.ranks}{split} {one.machine.kernel} {schemes}, {one.recipe.words}:"
        f" {bytes_text(one.memory.peak.size)}, {bound}{seconds_text(one.time.seconds)},"
        f" {one.cost.tokens_per_second:,.0f} tokens/s"
    )


def searched(request: Request) -> tuple[Recommendation, float]:
    """Return the recommendation, and the processor time that it took."""
    begin = time.process_time()
    found = recommend(request)
    return found, time.process_time() - begin


def table_of(memory: StepMemory) -> str:
    """Return what is held at each moment, as text."""
    names = list(dict.fromkeys(line.name for moment in memory.moments for line in moment.lines if line.size))
    heads = [moment.name.replace("backward of the ", "bwd, ") for moment in memory.moments]
    rows = [f"    {'GiB':28}" + "".join(f"{head:>17}" for head in heads)]
    for name in names:
        sizes = [sum(line.size for line in moment.lines if line.name == name) for moment in memory.moments]
        cells = (f"{size / (1 << 30):>17.1f}" if size else " " * 17 for size in sizes)
        rows.append(f"    {name:28}" + "".join(cells))
    sums = "".join(f"{moment.size / (1 << 30):>17.1f}" for moment in memory.moments)
    return "\n".join([*rows, f"    {'all':28}{sums}"])


def main() -> int:
    """Print everything; return 1 if a search was too slow, or a judged run does not fit."""
    slow, wrong, longest = 0, 0, 0.0
    for model, gpus in MODELS.items():
        for tokens in LENGTHS:
            found, seconds = searched(request_of(model, tokens, gpus))
            longest = max(longest, seconds)
            slow += seconds > MAX_SECONDS
            verdict = f"  SLOW: over {MAX_SECONDS:g} s" if seconds > MAX_SECONDS else ""
            print(f"{model}, {tokens:,} tokens, {gpus} h100: searched in {seconds:.1f} s{verdict}")
            for one in found.best:
                print(f"    {text_of(one)}")
            if not found.best:
                least = "nothing" if found.least is None else text_of(found.least)
                ways = " or ".join(change.option for change in found.changes) or "nothing that was tried"
                print(f"    does not fit; least: {least}; needs {ways}")
    print("\nPublished lengths:")
    for run in RUNS:
        request = request_of(run.model, run.tokens, run.gpus)
        found, _ = searched(replace(request, memory=run.memory, tp=run.tp, batch=run.batch))
        print(f"\n{run.source}: {run.model}, {run.tokens:,} tokens on {run.gpus} h100; {run.means}")
        least = thriftiest(found.request) if found.best else found.least
        assert least is not None
        share = least.memory.peak.size / found.request.room
        if found.best:
            print(f"    fits: {text_of(found.best[0])}")
            print(f"    least memory, {share:.2f} of the room: {text_of(least)}")
            continue
        wrong += run.judged
        kind = "WRONG" if run.judged else "not judged"
        print(f"    does NOT fit, {share:.2f} times the room ({kind}): {text_of(least)}")
        print(f"    it needs {' or '.join(change.option for change in found.changes) or 'what was not tried'}")
        print(table_of(least.memory))
    print(f"\n{len(MODELS) * len(LENGTHS)} searches, at most {longest:.1f} s of processor time (bar {MAX_SECONDS:g} s)")
    return 1 if slow or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
