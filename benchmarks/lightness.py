"""Count the code and the functions that a warm call runs. For information; there are no limits.

    python -m benchmarks.lightness

Calls are those of Python functions in `src/longspan`, counted by `sys.setprofile` in the calling thread, on the fifth
call. Frames are the deepest chain of them.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import longspan as ls
from benchmarks.ranks import Ranks

ROOT = Path(__file__).parents[1]
SRC = str(Path(ls.__file__).parent)
OLD_WORDS = re.compile(
    r"\b(beside|alike|nobody|(?:was|were|is|are) (?:asked for|given|told|said)"
    r"|(?:told|said|asked|found|made)(?=[ ,:=(\[.]))",
    re.IGNORECASE,
)


def count(call: Callable[[], Any], warm: int = 4) -> dict[str, int]:
    """Return the calls, distinct functions and deepest chain of our functions in a warm call."""
    for _ in range(warm):
        call()
    calls: list[str] = []
    depth = deepest = 0

    def profile(frame: Any, event: str, _: Any) -> None:
        nonlocal depth, deepest
        if event in ("call", "return") and frame.f_code.co_filename.startswith(SRC):
            depth += 1 if event == "call" else -1
            deepest = max(deepest, depth)
            if event == "call":
                calls.append(f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}")

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    if os.environ.get("LONGSPAN_SHOW_CALLS"):
        print("\n".join(name.removeprefix(SRC) for name in calls))
    return {"calls": len(calls), "functions": len(set(calls)), "frames": deepest}


def one_device() -> dict[str, int]:
    q, k, v = (torch.randn(1, 4, 256, 32) for _ in range(3))
    mask = ls.masks.causal()
    return count(lambda: ls.attention(q, k, v, mask))


def two_ranks() -> dict[str, int]:
    mask = ls.masks.causal(256)
    layout = ls.layouts.zigzag(256, 2)
    plan = ls.plan(mask, layout, q_heads=4, kv_heads=4, head_dim=32, dtype="float32")
    q, k, v = (torch.randn(1, 4, 128, 32) for _ in range(3))
    return count(lambda: ls.attention(q, k, v, plan, group=dist.group.WORLD))


def context_parallel_step() -> dict[str, int]:
    """A context of PyTorch's words over three buffers, with attention and backward inside."""
    from torch.distributed.device_mesh import init_device_mesh

    from longspan.torch_api import context_parallel

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    q, k, v = (torch.randn(1, 4, 256, 32) for _ in range(3))
    weight = torch.ones((), requires_grad=True)

    def step() -> None:
        with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
            attention = torch.nn.functional.scaled_dot_product_attention
            attention(q * weight, k * weight, v * weight, is_causal=True).sum().backward()

    return count(step)


def hugging_face_step() -> dict[str, int]:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from longspan import huggingface

    config = Qwen3Config(
        vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, attn_implementation="longspan",
    )  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(config)
    ids = torch.randint(0, 64, (1, 256))

    def step() -> None:
        inputs = huggingface.shard_inputs(model, {"input_ids": ids, "labels": ids}, dist.group.WORLD)
        model(**inputs).loss.backward()
        model.zero_grad()

    return count(step)


def main() -> int:
    files = sorted((ROOT / "src").rglob("*.py"))
    texts = [path.read_text() for path in files]
    pages = [path.read_text() for path in (*(ROOT / "docs").glob("**/*.md"), *ROOT.glob("*.md"))]
    rows = [
        ("lines in src", 44_700, sum(text.count("\n") for text in texts)),
        ("files in src", 170, len(files)),
        ("words of 0.2's English in src and docs", 50, sum(len(OLD_WORDS.findall(text)) for text in texts + pages)),
    ]
    alone = one_device()
    rows += [("calls, one device, forward", 70, alone["calls"]), ("  frames", 12, alone["frames"])]
    ranks = Ranks(2)
    try:
        rows.append(("calls, two Gloo ranks, forward", 200, ranks.run(two_ranks)[0]["calls"]))
        rows.append(("calls, context_parallel step, two ranks", 600, ranks.run(context_parallel_step)[0]["calls"]))
        rows.append(("calls, Hugging Face step, two ranks", 1_600, ranks.run(hugging_face_step)[0]["calls"]))
    finally:
        ranks.end()
    for name, bar, value in rows:
        print(f"{name:42}{value:>8,}   bar {bar:,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
