"""Compare attention over ranks with one device: output, every gradient, and leaks of what the mask hides.

Under torchrun over its processes; alone, over all ranks in this process. Exit code 0 if all is right, 1 if not.

  torchrun --nproc-per-node 4 -m longspan verify --docs 200,31,281 --window 64
  longspan verify --ranks 3 --schemes ring,exchange --dtype float32,bfloat16
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from longspan import layouts, masks
from longspan.api import attention, plan
from longspan.cli.launch import BACKENDS, describe_device, describe_kernel, init_group
from longspan.cli.output import Column, Row, Screen, count, counts, progress, schemes, screen_of
from longspan.cli.workload import WINDOW_HELP, check_seq_len, check_window
from longspan.errors import PlanError
from longspan.masks import Mask
from longspan.planning.plan import Plan
from longspan.planning.steps import ITEMSIZE
from longspan.verification import Report, loopback_attention, verify

SCHEMES = ("ring", "exchange", "all_gather", "all_to_all", "hybrid(2)")
LAYOUTS = ("balanced", "zigzag", "contiguous")
SEQ, RANKS = 384, 4
LEGEND = (
    "Shares: the error against one device in float64, of the most that rounding explains; above 100% is wrong. Tokens"
    " that the mask hides were changed, too, and nothing else may move."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
    text = "one or several, such as ring,hybrid(2,exchange) (all but hybrids)"
    add("--schemes", type=schemes, default=SCHEMES[:4], help=text)
    add("--layout", choices=LAYOUTS, default="balanced", help="who holds which tokens (balanced)")
    add("--softcap", type=float, help="cap scores")
    add("--sinks", action="store_true", help="a learned sink per head")
    add("--alibi", action="store_true", help="ALiBi with learned slopes")
    add("--dropout", type=float, default=0.0, help="drop probabilities (0)")
    add("--draw", type=int, default=0, help="seed of the random inputs (0)")
    text = "device of the tensors (cuda if every rank has a GPU, else cpu); ranks use NCCL on cuda, Gloo otherwise"
    add("--device", help=text)
    add("--json", action="store_true", help="print one JSON object and nothing else")


def run(args: argparse.Namespace) -> int:
    if not 0 <= args.draw < 1 << 63:
        raise PlanError(f"--draw must be a seed, 0 or more and below 2^63, but got {args.draw}.")
    mask, device = _mask(args), _device(args.device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    with one_thread(), _group(device, backend) as (group, rank, size):
        world = size if group is not None else RANKS if args.ranks is None else args.ranks
        if group is not None and args.ranks not in (None, world):
            raise PlanError(f"--ranks must be {world}, as torchrun started, but got {args.ranks}. Leave --ranks out.")
        if args.layout == "balanced":
            layout = layouts.balanced(mask, world_size=world)
        else:
            layout = getattr(layouts, args.layout)(mask.length(None), world)
        cases = [(dtype, scheme) for dtype in args.dtype.split(",") for scheme in args.schemes]
        reports: list[Report] = []
        kernels: dict[str, str] = {}
        scores, dropout = args.softcap is not None or args.alibi or bool(args.dropout), bool(args.dropout)
        with progress(args, "verifying", len(cases), is_main=rank == 0) as advance:
            for dtype, scheme in cases:
                advance(f"{scheme}, {dtype}")
                scheme_plan = plan(
                    mask, layout, q_heads=args.q_heads, kv_heads=args.kv_heads, head_dim=args.head_dim,
                    batch=args.batch, dtype=dtype, scheme=scheme,
                )  # fmt: skip
                kernels[dtype] = describe_kernel(
                    scheme_plan.sizes, dtype, device, score_function=scores, dropout=dropout
                )
                reports.append(_verify_plan(scheme_plan, group, args, device))
        ok = all(report.ok for report in reports)
        if rank == 0 and args.json:
            answer = {"ok": ok, "ranks": world, "device": str(device), "kernels": kernels}
            print(json.dumps(answer | {"checks": [report.as_dict() for report in reports]}))
        elif rank == 0:
            screen = screen_of(args)
            used = ", ".join(dict.fromkeys(kernels.values()))
            right = sum(report.ok for report in reports)
            screen.title(f"{right} of {len(reports)} right, on {describe_device(device)} by {used}")
            how = "in one process" if group is None else f"in as many processes, over {BACKENDS[backend]}"
            screen.text(f"{layout.name} over {world} ranks, {how}")
            screen.text()
            checks = [check_row(report, scheme, dtype) for report, (dtype, scheme) in zip(reports, cases, strict=True)]
            show_shares(checks, screen)
            screen.text()
            for report, (dtype, _) in zip(reports, cases, strict=True):
                if not report.ok:
                    print(f"{dtype}: {report}\n")
            screen.notes((LEGEND,))
    return 0 if ok else 1


def check_row(report: Report, scheme: str, dtype: str) -> dict[str, Any]:
    """Return a report as JSON: error over budget by tensor, None where it is infinite."""
    shares = {check.tensor: check.ratio if math.isfinite(check.ratio) else None for check in report.checks}
    return {"scheme": scheme, "dtype": dtype, "ok": report.ok, "shares": shares}


def share_text(share: float | None) -> str:
    """Format a share as per cent.

    >>> share_text(0.123), share_text(0.0), share_text(0.001), share_text(77.0), share_text(None)
    ('12%', '0%', '<1%', '>999%', 'infinite')
    """
    if share is None:
        return "infinite"
    if share > 9.99:
        return ">999%"
    return "<1%" if 0 < share < 0.005 else f"{100 * share:.0f}%"


def show_shares(checks: Sequence[dict[str, Any]], screen: Screen) -> None:
    """Print a table with a row for each scheme and dtype, and a column for each tensor."""
    names = list(dict.fromkeys(name for check in checks for name in check["shares"]))
    heads = [name.replace("gradient of ", "d") for name in names]
    columns = (Column("scheme", False), Column("dtype", False), *map(Column, heads), Column("", False))
    rows: list[Row] = []
    for check in checks:
        shares = check["shares"]
        cells = (share_text(shares[name]) if name in shares else "-" for name in names)
        rows.append(Row((check["scheme"], check["dtype"], *cells, "right" if check["ok"] else "WRONG")))
    screen.table(columns, rows)


def _verify_plan(scheme_plan: Plan, group: Any, args: argparse.Namespace, device: Any) -> Report:
    import torch

    generator = torch.Generator().manual_seed(args.draw)
    options: dict[str, Any] = {} if args.softcap is None else {"softcap": args.softcap}
    if args.sinks:
        options["sinks"] = torch.randn(args.q_heads, generator=generator).to(device).requires_grad_()
    if args.alibi:
        options["alibi"] = (torch.rand(args.q_heads, generator=generator) / 8).to(device).requires_grad_()
    if args.dropout:
        options |= {"dropout": args.dropout, "seed": args.draw}

    def call(q: Any, k: Any, v: Any) -> Any:
        if group is None:
            return loopback_attention(q, k, v, scheme_plan, **options)
        return attention(q, k, v, scheme_plan, group=group, **options)

    return verify(call, None, scheme_plan, group=group, draw=args.draw, device=device, **options)


def _mask(args: argparse.Namespace) -> Mask:
    if args.docs == "full":
        check_window(args)
        return masks.full(SEQ if args.seq is None else args.seq)
    if args.docs == "causal":
        mask = masks.causal(SEQ if args.seq is None else args.seq)
    else:
        try:
            lengths = counts(args.docs)
        except argparse.ArgumentTypeError:
            raise PlanError(
                f"--docs must be causal, full, or lengths such as 200,31,281 or 1k,3k, each 1 or more, but got"
                f" {args.docs!r:.60}. `longspan plan` reads lengths from files."
            ) from None
        check_seq_len(args, lengths)
        mask = masks.documents(lengths) & masks.causal()
    return mask if args.window is None else mask & masks.sliding_window(args.window)


def _device(name: str | None) -> Any:
    """Return the device of that name if tensors can be on it; each rank of a host has its own CUDA device."""
    import torch

    try:
        device = torch.device(name or _default_device(torch.cuda.device_count()))
        if device.type == "meta":
            raise PlanError("--device must hold data, but got meta. Use cpu, or leave it out.")
        if device.type == "cuda" and device.index is None and torch.cuda.is_available():
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # which one differs by device
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise PlanError(
            f"--device {name!r:.40} cannot be used by PyTorch here: {reason:.120}. Use cpu, or leave it out."
        ) from error
    return device


def _default_device(num_gpus: int) -> str:
    """Return "cuda" if every rank of this host has a GPU, and an existing process group can send from it."""
    import torch.distributed as dist

    if dist.is_initialized() and "cuda:" not in str(dist.get_backend_config()):
        return "cpu"
    return "cuda" if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= num_gpus else "cpu"


@contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread: ranks share a host's cores, and these tensors are small."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _group(device: Any, backend: str) -> Iterator[tuple[Any, int, int]]:
    """Yield the group of torchrun's processes, this one's rank and their number; (None, 0, 1) without torchrun."""
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
    init_group(backend, str(device))
    yield dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    dist.barrier()  # other ranks may still use the connections; after an error, torchrun ends all of them
    dist.destroy_process_group()
