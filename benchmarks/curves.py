"""Compare training curves: FSDP2 and sharded sequences on four Gloo ranks against one process of plain PyTorch.

    python -m benchmarks.curves                                    # exits with 1 when a bar is missed; 3 minutes
    python -m benchmarks.curves --picture docs/images/curves.png   # also draws them (needs matplotlib)

The one process does not use Longspan: dense masks, explicit scores, its own labels and cross-entropy. The ranks train
as in `docs/training.md`. Text is packed, with different documents in every step. Runs with common mistakes must differ
from the curve, otherwise the comparison could not fail.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from torch.distributed.fsdp import fully_shard

import longspan as ls
from benchmarks.curve_models import GEMMA, LLAMA, Attend, Decoder, Style
from benchmarks.curve_text import Row, packed_row
from benchmarks.ranks import Ranks
from longspan.training import Mesh, check_same, make_mesh, shard_batch, token_loss

SEQ_LEN, ROWS, STEPS = 512, 2, 200
RATE, WARMUP, CLIP = 3e-3, 20, 1.0
FEW = 30
"""Steps of the short runs."""
BAR, MISTAKE_BAR = 1e-4, 1e-3
LATE_LABELS = "labels shifted after sharding"
STYLES = {style.name: style for style in (LLAMA, GEMMA)}


def batch_of(step: int, seq_len: int) -> list[Row]:
    """Return the rows of a step: the same on every rank, with different documents in each."""
    return [packed_row(ROWS * step + row, seq_len) for row in range(ROWS)]


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)


def rate_at(step: int) -> float:
    """Return the learning rate: warm-up, then a cosine down to a tenth."""
    if step < WARMUP:
        return RATE * (step + 1) / WARMUP
    return RATE * (0.55 + 0.45 * math.cos(math.pi * min(1.0, (step - WARMUP) / (STEPS - WARMUP))))


def updated(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor, rate: float) -> None:
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()


# -- one process, plain PyTorch ----------------------------------------------------------------------------------------


def dense_attend(style: Style, document_BS: Tensor) -> Attend:
    """Compute attention with explicit scores."""
    place = torch.arange(document_BS.shape[1])
    distance = place[:, None] - place
    seen = (document_BS[:, :, None] == document_BS[:, None, :]) & (distance >= 0)
    near = seen & (distance < (style.window or 1))

    def attend(q: Tensor, k: Tensor, v: Tensor, kind: str) -> Tensor:
        shared = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
        scores = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
        if style.softcap is not None:
            scores = style.softcap * torch.tanh(scores / style.softcap)
        hidden = ~(near if kind == "window" else seen)[:, None]
        return torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ v

    return attend


def one_process(name: str, steps: int, seq_len: int) -> list[float]:
    """Return the losses by step."""
    style = STYLES[name]
    torch.manual_seed(0)
    model = Decoder(style)
    optimizer, losses = optimizer_of(model), list[float]()
    for step in range(steps):
        rows = batch_of(step, seq_len)
        ids = torch.stack([row.ids for row in rows])
        lengths = [torch.tensor(row.lengths) for row in rows]
        document = torch.stack([torch.repeat_interleave(torch.arange(len(n)), n) for n in lengths])
        positions = torch.stack([torch.cat([torch.arange(int(n)) for n in row]) for row in lengths])
        logits = model(ids, positions, dense_attend(style, document))
        inside = document[:, 1:] == document[:, :-1]
        loss = F.cross_entropy(logits[:, :-1][inside], ids[:, 1:][inside])
        updated(model, optimizer, loss, rate_at(step))
        losses.append(loss.item())
    return losses


# -- many ranks, as a user would ---------------------------------------------------------------------------------------


def masks_of(style: Style, rows: list[Row], mistake: str | None) -> dict[str, ls.masks.Mask]:
    """Return the mask of each kind of layer, in global positions."""
    documents = [ls.masks.documents(row.lengths) for row in rows]
    if mistake == "documents see each other":
        documents = [ls.masks.full(sum(row.lengths)) for row in rows]
    seen = {"full": ls.masks.causal()}
    if style.window is not None:
        seen["window"] = ls.masks.sliding_window(style.window - 1)  # it counts the tokens before the query
        if mistake == "windows become full":
            seen["window"] = ls.masks.causal()
    by_kind = {kind: [one & mask for one in documents] for kind, mask in seen.items()}
    return {kind: masks[0] if len(masks) == 1 else ls.masks.per_row(*masks) for kind, masks in by_kind.items()}


def sharded_step(style: Style, model: Any, mesh: Mesh, rows: list[Row], mistake: str | None) -> Tensor:
    """Return the loss of one step on this rank's shard of its rows."""
    rank, world_size = mesh.cp.get_local_rank(), mesh.cp.size()
    ids, lengths = torch.stack([row.ids for row in rows]), [row.lengths for row in rows]
    batch = {"input_ids": ids, "labels": ids}
    check_same(batch, mesh.cp)
    masks = masks_of(style, rows, mistake)
    layout = ls.layouts.balanced(*masks.values(), world_size=world_size)
    sizes: dict[str, Any] = {
        "q_heads": style.q_heads,
        "kv_heads": style.kv_heads,
        "head_dim": style.head_dim,
        "batch": len(rows),
    }
    plans = {kind: ls.plan(mask, layout, **sizes, dtype="float32", scheme="exchange") for kind, mask in masks.items()}
    mine = shard_batch(batch, layout, rank, documents=lengths, positions="document")
    labels = mine["shift_labels"]
    if mistake == LATE_LABELS:
        labels = F.pad(mine["input_ids"][:, 1:], (0, 1), value=-100)

    def attend(q: Tensor, k: Tensor, v: Tensor, kind: str) -> Tensor:
        return ls.attention(q, k, v, plans[kind], group=mesh.cp, softcap=style.softcap)

    logits = model(mine["input_ids"], mine["position_ids"], attend)
    return token_loss(logits, labels, group=mesh.dp_cp, gradients="average")


def on_ranks(name: str, steps: int, seq_len: int, dp: int, cp: int, mistake: str | None = None) -> list[float]:
    """Return the losses by step on one of dp * cp ranks: FSDP2 over all, sequences over cp."""
    style, mesh = STYLES[name], make_mesh(dp=dp, cp=cp, device_type="cpu")
    torch.manual_seed(0)
    model = Decoder(style)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh.dp_cp)
    fully_shard(model, mesh=mesh.dp_cp)
    optimizer, losses = optimizer_of(model), list[float]()
    for step in range(steps):
        rows = batch_of(step, seq_len)[mesh.dp.get_local_rank() :: dp]
        loss = sharded_step(style, model, mesh, rows, mistake)
        updated(model, optimizer, loss, rate_at(step))
        losses.append(loss.item())
    return losses


# -- comparing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """The losses of one run."""

    label: str
    losses: list[float]
    mistake: bool = False


@dataclass(frozen=True)
class Family:
    """All runs of one model; the first is that of one process."""

    name: str
    curves: list[Curve]

    def difference(self, curve: Curve) -> list[float]:
        """Return the differences from one process by step."""
        return [abs(a - b) for a, b in zip(curve.losses, self.curves[0].losses, strict=False)]


MISTAKES = {"llama": ("documents see each other", LATE_LABELS), "gemma": ("windows become full",)}


def family_of(name: str, ranks: Ranks, steps: int, seq_len: int, few: int) -> Family:
    """Run one model on 2 x 2 ranks for all steps, on 1 x 4 and with mistakes for a few."""

    def run(count: int, dp: int, cp: int, mistake: str | None = None) -> list[float]:
        by_rank = ranks.run(on_ranks, name, count, seq_len, dp, cp, mistake)
        if any(losses != by_rank[0] for losses in by_rank):
            raise AssertionError(f"ranks report different losses: {[losses[-1] for losses in by_rank]}")
        return by_rank[0]

    curves = [Curve("one process, plain PyTorch", one_process(name, steps, seq_len))]
    curves.append(Curve("FSDP2, dp 2 x cp 2", run(steps, 2, 2)))
    curves.append(Curve("FSDP2, dp 1 x cp 4", run(few, 1, 4)))
    curves += [Curve(mistake, run(few, 2, 2, mistake), mistake=True) for mistake in MISTAKES[name]]
    return Family(name, curves)


def judged(family: Family, say: Callable[[str], None] = print) -> int:
    """Print a line per run; return how many miss their limit."""
    first, last = family.curves[0].losses[0], sum(family.curves[0].losses[-10:]) / 10
    missed = int(last > 0.5 * first)
    verdict = "  MISSED: it must fall by half" if missed else ""
    say(f"{family.name}: loss of one process {first:.3f} at first, {last:.3f} at last{verdict}")
    for curve in family.curves[1:]:
        largest = max(family.difference(curve))
        met = largest > MISTAKE_BAR if curve.mistake else largest <= BAR
        missed += not met
        bar = f"> {MISTAKE_BAR:.0e}" if curve.mistake else f"<= {BAR:.0e}"
        say(f"  {curve.label:32s} {len(curve.losses):4d} steps  {largest:8.1e}  {bar}{'' if met else '  MISSED'}")
    return missed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", help="a PNG to draw")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    began, missed, families = time.perf_counter(), 0, list[Family]()
    print("largest difference of losses from those of one process")
    with Ranks(4) as ranks:
        for name in STYLES:
            families.append(family_of(name, ranks, STEPS, SEQ_LEN, FEW))
            missed += judged(families[-1])
    print(f"{time.perf_counter() - began:.0f} s; {f'{missed} bars missed' if missed else 'every bar met'}")
    if args.picture:
        from benchmarks.curve_picture import draw

        draw(families, args.picture)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
