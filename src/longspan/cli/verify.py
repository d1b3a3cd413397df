"""Compare attention over ranks with one device: output, every gradient, and leaks of what the mask hides.

Under torchrun over its processes; alone, over all ranks in this process. Exit code 0 if all is right, 1 if not.

  torchrun --nproc-per-node 4 -m longspan verify --docs 200,31,281 --window 64
  longspan verify --ranks 3 --schemes ring,exchange --dtype float32,bfloat16
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from typing import Any

from longspan import layouts
from longspan.api import attention, plan
from longspan.cli.launch import BACKENDS, add_backend, describe_device, describe_kernel, join_ranks, one_thread
from longspan.cli.output import Row, count, print_json, print_table, print_text, progress
from longspan.cli.workload import WINDOW_HELP, check_scheme, mask_of
from longspan.errors import PlanError
from longspan.planning.plan import Plan
from longspan.planning.steps import ITEMSIZE
from longspan.verification import Report, loopback_attention, verify

SCHEMES = "ring,exchange,all_gather,all_to_all"
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
    add("--schemes", default=SCHEMES, help=f"one or several, such as ring,hybrid(2,exchange) ({SCHEMES})")
    add("--layout", choices=LAYOUTS, default="balanced", help="who holds which tokens (balanced)")
    add("--softcap", type=float, help="cap scores")
    add("--sinks", action="store_true", help="a learned sink per head")
    add("--alibi", action="store_true", help="ALiBi with learned slopes")
    add("--dropout", type=float, default=0.0, help="drop probabilities (0)")
    add("--draw", type=int, default=0, help="seed of the random inputs (0)")
    add_backend(parser)
    parser.set_defaults(seed=None)


def run(args: argparse.Namespace) -> int:
    if args.docs in ("causal", "full") and args.seq is None:
        args.seq = SEQ
    _, _, mask = mask_of(args)
    schemes = [check_scheme(name) for name in re.split(r"[,;](?![^(]*\))", args.schemes)]  # hybrid(2,ring) is one
    with one_thread(), join_ranks(args.backend) as ranks:
        world = ranks.size if ranks.size > 1 else RANKS if args.ranks is None else args.ranks
        if ranks.size > 1 and args.ranks not in (None, world):
            raise PlanError(f"--ranks must be {world}, as torchrun started, but got {args.ranks}. Leave --ranks out.")
        if args.layout == "balanced":
            layout = layouts.balanced(mask, world_size=world)
        else:
            layout = getattr(layouts, args.layout)(mask.length(None), world)
        checks: list[dict[str, Any]] = []
        failures: list[str] = []
        scores, dropout = args.softcap is not None or args.alibi or bool(args.dropout), bool(args.dropout)
        advance = progress(args, "verifying", is_main=ranks.is_main)
        for dtype in args.dtype.split(","):
            for scheme in schemes:
                advance(f"{scheme}, {dtype}")
                scheme_plan = plan(
                    mask, layout, q_heads=args.q_heads, kv_heads=args.kv_heads, head_dim=args.head_dim,
                    batch=args.batch, dtype=dtype, scheme=scheme,
                )  # fmt: skip
                report = _verify_plan(scheme_plan, ranks.group, args, ranks.device)
                kernel = describe_kernel(scheme_plan.sizes, dtype, ranks.device, score_function=scores, dropout=dropout)
                checks.append({**check_row(report, scheme, dtype), "kernel": kernel, "report": report.as_dict()})
                failures += [] if report.ok else [f"{dtype}: {report}\n"]
    if ranks.is_main and args.json:
        print_json("verify", {"ok": not failures, "ranks": world, "device": ranks.device, "checks": checks})
    elif ranks.is_main:
        used = ", ".join(dict.fromkeys(check["kernel"] for check in checks))
        right = len(checks) - len(failures)
        print_text(f"{right} of {len(checks)} right, on {describe_device(ranks.device)} by {used}")
        how = f"in as many processes, over {BACKENDS[ranks.backend]}" if ranks.size > 1 else "in one process"
        print_text(f"{layout.name} over {world} ranks, {how}")
        print_text()
        show_shares(checks)
        print("\n".join(failures), end="")
        print_text(LEGEND)
    return 1 if failures else 0


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


def show_shares(checks: Sequence[dict[str, Any]]) -> None:
    """Print a table with a row for each scheme and dtype, and a column for each tensor."""
    names = list(dict.fromkeys(name for check in checks for name in check["shares"]))
    heads = ("scheme", "dtype", *(name.replace("gradient of ", "d") for name in names), "")
    rows: list[Row] = []
    for check in checks:
        shares = check["shares"]
        cells = (share_text(shares[name]) if name in shares else "-" for name in names)
        rows.append(Row((check["scheme"], check["dtype"], *cells, "right" if check["ok"] else "WRONG")))
    print_table(heads, rows, left=(0, 1, len(heads) - 1))


def _verify_plan(scheme_plan: Plan, group: Any, args: argparse.Namespace, device: str) -> Report:
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
