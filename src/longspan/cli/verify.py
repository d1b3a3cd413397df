"""Checks attention over ranks against one device: output, every gradient, and leaks of what the mask hides.

Under torchrun over its processes; alone, over all ranks in this process. Exit code 0 if all is right, 1 if not.

  torchrun --nproc-per-node 4 -m longspan verify --docs 200,31,281 --window 64
  longspan verify --ranks 3 --schemes ring,exchange --dtype float32,bfloat16
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from longspan import layouts, masks
from longspan.api import attention, plan
from longspan.cli.bench import LEGEND, CheckedScheme, show_shares
from longspan.cli.launch import BACKENDS, device_used, kernel_used, meet
from longspan.cli.output import Screen, count, counts, progress, schemes, screen_of
from longspan.cli.workload import WINDOW_HELP
from longspan.errors import PlanError
from longspan.masks import Mask
from longspan.planning.plan import Plan
from longspan.planning.steps import ITEMSIZE
from longspan.verification import Report, loopback_attention, verify

SCHEMES = ("ring", "exchange", "all_gather", "all_to_all", "hybrid(2)")
LAYOUTS = ("balanced", "zigzag", "contiguous")
SEQ, RANKS = 384, 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `longspan verify`."""
    add = parser.add_argument
    add("--seq", type=count, metavar="TOKENS", help=f"tokens of the sequence, a few hundred are enough ({SEQ})")
    add("--docs", default="causal", help="causal, full, or lengths of packed documents such as 200,31,281 (causal)")
    add("--window", type=count, help=WINDOW_HELP)
    add("--ranks", type=count, help=f"ranks in this process, without torchrun ({RANKS})")
    add("--q-heads", type=int, default=4, help="query heads (4)")
    add("--kv-heads", type=int, default=2, help="key/value heads (2)")
    add("--head-dim", type=int, default=32, help="features of a head (32)")
    add("--batch", type=int, default=1, help="batch rows (1)")
    add("--dtype", default="float32", help=f"one or several of {', '.join(ITEMSIZE)} (float32)")
    add(
        "--schemes",
        type=schemes,
        default=SCHEMES[:4],
        help="one or several, such as ring,hybrid(2,exchange) (all but hybrids)",
    )
    add("--layout", choices=LAYOUTS, default="balanced", help="who holds which tokens (balanced)")
    add("--softcap", type=float, help="cap scores")
    add("--sinks", action="store_true", help="a learned sink per head")
    add("--alibi", action="store_true", help="ALiBi with learned slopes")
    add("--dropout", type=float, default=0.0, help="drop probabilities (0)")
    add("--draw", type=int, default=0, help="which random inputs (0)")
    words = "where tensors live (cuda if every rank has a GPU, else cpu); ranks talk over NCCL for cuda, over Gloo else"
    add("--device", help=words)
    add("--json", action="store_true", help="print one JSON object and nothing else")


def run(args: argparse.Namespace) -> int:
    """Checks every scheme and dtype; 0 if all are right, 1 if not."""
    _check_numbers(args)
    mask, device = _mask(args), _device(args.device)
    with _one_thread(), _group(device) as (group, rank, size):
        world = size if group is not None else RANKS if args.ranks is None else args.ranks
        if group is not None and args.ranks not in (None, world):
            raise PlanError(f"--ranks {args.ranks} was asked for, but torchrun started {world}. Leave --ranks out.")
        if args.layout == "balanced":
            layout = layouts.balanced(mask, world_size=world)
        else:
            layout = getattr(layouts, args.layout)(mask.length(None), world)
        cases = [(dtype, scheme) for dtype in args.dtype.split(",") for scheme in args.schemes]
        reports: list[Report] = []
        used: dict[str, str] = {}
        with progress(args, "verifying", len(cases), speaks=rank == 0) as advance:
            for dtype, scheme in cases:
                advance(f"{scheme}, {dtype}")
                scheme_plan = plan(
                    mask, layout, q_heads=args.q_heads, kv_heads=args.kv_heads, head_dim=args.head_dim,
                    batch=args.batch, dtype=dtype, scheme=scheme,
                )  # fmt: skip
                used[dtype] = _kernel(scheme_plan, args, device)
                reports.append(_verify_plan(scheme_plan, group, args, device))
        ok = all(report.ok for report in reports)
        checked = [CheckedScheme.of(report, *reversed(case)) for report, case in zip(reports, cases, strict=True)]
        if rank == 0 and args.json:
            answer = {"ok": ok, "ranks": world, "device": str(device), "kernels": used}
            print(json.dumps(answer | {"checks": [report.as_dict() for report in reports]}))
        elif rank == 0:
            where = f"{device_used(device)} by {', '.join(dict.fromkeys(used.values()))}"
            how = "in one process" if group is None else f"in as many processes, over {BACKENDS[_backend(device)]}"
            show(checked, reports, f"{layout.name} over {world} ranks, {how}", where, screen_of(args))
    return 0 if ok else 1


def show(checked: list[CheckedScheme], reports: list[Report], asked: str, where: str, screen: Screen) -> None:
    """The table of shares; below it, what is wrong, with its likely causes."""
    screen.title(f"{sum(one.ok for one in checked)} of {len(checked)} right, on {where}")
    screen.text(asked)
    screen.text()
    show_shares(checked, screen)
    screen.text()
    for one, report in zip(checked, reports, strict=True):
        if not one.ok:
            print(f"{one.dtype}: {report}\n")
    screen.notes((LEGEND,))


def _verify_plan(scheme_plan: Plan, group: Any, args: argparse.Namespace, device: Any) -> Report:
    import torch

    draw = torch.Generator().manual_seed(args.draw)
    options: dict[str, Any] = {} if args.softcap is None else {"softcap": args.softcap}
    if args.sinks:
        options["sinks"] = torch.randn(args.q_heads, generator=draw).to(device).requires_grad_()
    if args.alibi:
        options["alibi"] = (torch.rand(args.q_heads, generator=draw) / 8).to(device).requires_grad_()
    if args.dropout:
        options |= {"dropout": args.dropout, "seed": args.draw}

    def call(q: Any, k: Any, v: Any) -> Any:
        if group is None:
            return loopback_attention(q, k, v, scheme_plan, **options)
        return attention(q, k, v, scheme_plan, group=group, **options)

    return verify(call, None, scheme_plan, group=group, draw=args.draw, device=device, **options)


def _kernel(scheme_plan: Plan, args: argparse.Namespace, device: Any) -> str:
    scores = args.softcap is not None or args.alibi or bool(args.dropout)
    return kernel_used(scheme_plan.sizes, scheme_plan.dtype, device, score_function=scores, dropout=bool(args.dropout))


def _check_numbers(args: argparse.Namespace) -> None:
    """Refuses meaningless numbers before anything is built from them."""
    if not 0 <= args.draw < 1 << 63:
        raise PlanError(f"--draw {args.draw} was asked for. It is a seed, 0 or more and below 2^63.")


def _mask(args: argparse.Namespace) -> Mask:
    seq_len = SEQ if args.seq is None else args.seq
    if args.docs == "full":
        if args.window is not None:
            raise PlanError("--window goes with causal documents, but --docs full was given. Say --docs causal.")
        return masks.full(seq_len)
    mask = masks.causal(seq_len) if args.docs == "causal" else masks.documents(_lengths(args)) & masks.causal()
    return mask if args.window is None else mask & masks.sliding_window(args.window)


def _lengths(args: argparse.Namespace) -> tuple[int, ...]:
    try:
        lengths = counts(args.docs)
    except argparse.ArgumentTypeError:
        raise PlanError(
            f"--docs is causal, full, or lengths such as 200,31,281 or 1k,3k, each 1 or more, but {args.docs!r:.60} was"
            f" given; `longspan plan` reads lengths from files."
        ) from None
    if args.seq not in (None, sum(lengths)):
        raise PlanError(
            f"--docs lists {len(lengths)} documents of {sum(lengths)} tokens together, but --seq is {args.seq}. Leave"
            f" --seq out, or make them agree."
        )
    return lengths


def _device(name: str | None) -> Any:
    """The device of that name, if tensors can live on it here; ranks of a host have a CUDA device each."""
    import torch

    try:
        device = torch.device(name or _usual_device(torch.cuda.device_count()))
        if device.type == "meta":
            raise PlanError("--device meta was asked for, but tensors hold no numbers there. Say cpu, or leave it out.")
        if device.type == "cuda" and device.index is None and torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as wrong:  # as torch says it, which differs by device
        reason = str(wrong).strip().partition("\n")[0].rstrip(".")
        raise PlanError(
            f"--device {name!r:.40} was asked for, but PyTorch cannot use it here: {reason:.120}. Say cpu, or leave it"
            f" out."
        ) from wrong
    return device


def _usual_device(num_gpus: int) -> str:
    """A GPU where every rank of this host has one of its own, and ranks that have met can send what is on it."""
    import torch.distributed as dist

    if dist.is_initialized() and "cuda:" not in str(dist.get_backend_config()):
        return "cpu"
    return "cuda" if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= num_gpus else "cpu"


def _backend(device: Any) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


@contextmanager
def _one_thread() -> Iterator[None]:
    """Ranks of one host share its cores, and these tensors are small: threads would only wait for one another."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _group(device: Any) -> Iterator[tuple[Any, int, int]]:
    """The group of all processes that torchrun started, this one's rank, and their number; (None, 0, 1) without."""
    import torch.distributed as dist

    if dist.is_initialized():
        yield dist.group.WORLD, dist.get_rank(), dist.get_world_size()
        return
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield None, 0, 1
        return
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise PlanError(
            f"RANK and WORLD_SIZE are set, but {' and '.join(missing)} not, so ranks cannot meet. Start all with"
            f" torchrun, or unset RANK and WORLD_SIZE to run in one process."
        )
    meet(_backend(device), str(device))
    yield dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    dist.barrier()  # nobody closes connections that another rank still uses; on errors, torchrun ends all
    dist.destroy_process_group()
