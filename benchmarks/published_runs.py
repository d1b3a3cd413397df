"""Facts about published training runs of whole models: system, hardware, step time, memory.

Chosen before anything was predicted, by these rules: bfloat16, full fine-tuning or pre-training, FSDP or ZeRO-3, with a
ring or Ulysses or without context parallelism, every layer checkpointed or none; model, tokens, GPUs and attention's
kernel are stated, or follow from the source. None was measured by us.

A run whose optimizer works on the host is judged only if its source's shortest step is at most a tenth of it, since the
host's time is not modelled. Its memory is not judged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from longspan.planning.machine import A100, B200_FA4, H100, H100_CUDNN, H200_FA3, Machine
from longspan.sizing import Recipe, built_in_config

GIB = float(1 << 30)
M, K = 1 << 20, 1 << 10
TRL = "TRL, guide to 1M tokens"
TITAN = "torchtitan, docs/performance"
STAS = "ml-engineering, when to upgrade GPUs"
EASY = "EasyContext, README"
SOURCES = {
    TRL: "huggingface/trl#6845, #6846 and docs/source/long_context_training.md; huggingface/transformers#48324;"
    " huggingface/accelerate#4175, #4184. PyTorch's ring, cuDNN attention unless FA2 is named; float32 state, as"
    " accelerate makes it under mixed precision; 2M and 4M tokens with an offload tuned by hand; GB as 1e9 bytes",
    TITAN: "pytorch/torchtitan, docs/performance.md (2024): 64 A100, FSDP2",
    "torchtitan#165": "pytorch/torchtitan#165: 8 H100 of 95 GiB, FSDP2, eager; the model follows from its MFU",
    STAS: "stas00/ml-engineering, insights/when-to-upgrade-gpus: 8 GPUs, one sequence each, ZeRO-3, Adam on the host",
    EASY: "jzhang38/EasyContext: Llama-2-7B on 8 A100, zigzag ring, ZeRO-3 with Adam on the host, first 5 steps",
}
NOT_REPRESENTED = (
    ("NeMo / TransformerEngine, Llama 2 7B and 3 8B, 4K to 1M tokens", "FP8, and tensor parallel from 16K on"),
    ("torchtitan 2024-12, Llama 3.1 8B with CP to 262,144 tokens", "Float8 products; cards limited to 500 W"),
    ("torchtitan 2024-12 and 2025-06, FSDP", "selective checkpointing"),
    ("Llama 3 405B, 131,072 tokens", "tensor and pipeline parallel"),
    (
        "ALST, Llama 8B to 15M tokens",
        "step times were not at hand; its lengths are in `python -m benchmarks.recommend`",
    ),
    ("UPipe, Llama 3 8B to 5M tokens", "its tables were not at hand"),
    ("USP, LoongTrain, DistFlashAttn", "checkpointing and sharding are not stated in the sources"),
    ("NeMo Automodel, mixtures of experts", "expert parallel"),
    ("torchtune, Llama 3.1 8B and 70B", "one GPU with 8-bit Adam, or parameters on the host"),
    ("ms-swift, QwQ-32B at 512,000 tokens", "LoRA"),
    ("TRL, Qwen3-30B-A3B and Qwen3-32B: memory", "parameters on the host, or what else is not said"),
    ("TRL, Qwen3-0.6B at 4M tokens: memory", "not stated whether inputs of layers were on the host"),
)


def _dense(family: str, *sizes: int, **more: Any) -> dict[str, Any]:
    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "vocab_size")  # fmt: skip
    return {"model_type": family, **dict(zip(keys, sizes, strict=True)), **more}


CONFIGS = {
    "qwen3-0.6b": _dense("qwen3", 1024, 3072, 28, 16, 8, 151936, head_dim=128, tie_word_embeddings=True),
    "qwen3-4b": _dense("qwen3", 2560, 9728, 36, 32, 8, 151936, head_dim=128, tie_word_embeddings=True),
    "llama2-7b": _dense("llama", 4096, 11008, 32, 32, 32, 32000),
    "llama2-13b": _dense("llama", 5120, 13824, 40, 40, 40, 32000),
    "llama2-70b": _dense("llama", 8192, 28672, 80, 64, 8, 32000),
    **{name: built_in_config(name) for name in ("qwen3-8b", "qwen3-32b", "qwen3-30b-a3b", "llama3-8b", "llama3-70b")},
}


@dataclass(frozen=True, slots=True)
class Run:
    """A published run: `ranks` share a sequence, with `data_parallel` such groups."""

    source: str
    model: str
    tokens: int
    machine: Machine
    recipe: Recipe
    ranks: int = 1
    data_parallel: int = 1
    batch: int = 1
    seconds: float | None = None
    """Seconds of a step."""
    peak: float | None = None
    """Bytes of a GPU."""
    unjudged: str = ""
    """Why it is not judged."""


def _trl() -> Iterator[Run]:
    plain, offload = Recipe(), Recipe(offload=True)
    big = Run(TRL, "qwen3-8b", M, H100_CUDNN, offload, 8)
    small = replace(big, model="qwen3-0.6b", recipe=plain)
    yield replace(big, seconds=380, peak=56.2e9)
    yield replace(big, machine=H100, seconds=606)
    yield replace(big, tokens=2 * M, ranks=16, seconds=696)
    yield replace(big, tokens=4 * M, ranks=32, seconds=1346)
    yield replace(big, model="qwen3-4b", machine=H100, recipe=plain, seconds=582)
    yield replace(small, seconds=137, peak=27.9e9)
    yield replace(small, recipe=offload, peak=20.8e9)
    yield replace(small, tokens=4 * M, recipe=offload, seconds=2135)
    yield replace(big, model="qwen3-30b-a3b", seconds=483)
    yield replace(big, model="qwen3-32b", recipe=replace(offload, mlp_chunks=8), seconds=1295)


def _titan() -> Iterator[Run]:
    whole = Recipe(logits=True)
    run = Run(TITAN, "llama3-70b", 8 * K, A100, whole, data_parallel=64)
    yield replace(run, seconds=8192 / 331)
    yield replace(run, model="llama2-70b", tokens=4 * K, batch=2, seconds=8192 / 353)
    bare = replace(whole, checkpointing=False)
    yield replace(run, model="llama2-13b", tokens=4 * K, batch=2, recipe=bare, seconds=8192 / 2162)
    small = Run("torchtitan#165", "llama2-7b", 2 * K, H100, whole, data_parallel=8, batch=8)
    yield replace(small, peak=0.2392 * 95.0396 * GIB)
    yield replace(small, seconds=16384 / 6200, unjudged="its cards are likely limited to 500 W")


HOST = "the host's optimizer may be over a tenth of it"


def _with_adam_on_the_host(runs: list[Run]) -> Iterator[Run]:
    """Return the runs of one source, each judged if its shortest step is at most a tenth of it."""
    shortest = min(run.seconds for run in runs if run.seconds is not None)
    for run in runs:
        yield run if run.seconds is not None and 10 * shortest <= run.seconds else replace(run, unjudged=HOST)


def _stas() -> Iterator[Run]:
    """Return TFLOP/s of 6 operations for a token and parameter, and 6 for a pair of tokens below the diagonal."""
    lengths = [8 * K, 32 * K, 64 * K, 128 * K, 192 * K, 256 * K]
    for machine, rates in ((H200_FA3, (141, 324, 391, 420, 422, 419)), (B200_FA4, (167, 524, 719, 836, 852, 852))):
        run = Run(STAS, "llama3-8b", 0, machine, Recipe(), data_parallel=8)
        flops = [6 * 8.03e9 * n + 6 * n * n * 4096 * 32 for n in lengths]
        result = [
            replace(run, tokens=n, seconds=flop / rate / 1e12)
            for n, flop, rate in zip(lengths, flops, rates, strict=True)
        ]
        yield from _with_adam_on_the_host(result)


def _easy() -> Iterator[Run]:
    run = Run(EASY, "llama2-7b", 0, A100, Recipe(logits=True), 8)
    apart = replace(run, tokens=64 * K, ranks=1, data_parallel=8, seconds=8 * 64 * K / 10240)
    rates = ((64 * K, 7816), (128 * K, 4266), (512 * K, 2133), (700 * K, 1603))
    shared = [replace(run, tokens=n, seconds=n / rate) for n, rate in rates]
    yield from _with_adam_on_the_host([apart, *shared])


def runs() -> list[Run]:
    """Return all runs."""
    return [*_trl(), *_titan(), *_stas(), *_easy()]


FIXED = Run(STAS, "llama3-8b", 8 * K, H200_FA3, Recipe(checkpointing=False, logits=True), data_parallel=8)
FIXED_SECONDS = 6 * 8.03e9 * 8192 / 463e12
"""Source of the share of matrix products: the same source's step of 8K tokens without checkpointing; everything but
attention ran at 463 TFLOP/s. It is not judged."""
SUSTAINED = 755e12
"""FLOP/s that one product alone sustains on these SMs, by the same author."""
