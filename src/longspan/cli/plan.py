"""Memory, time and traffic of a run, before it is run.

longspan plan --model qwen3-8b --seq 256k --gpus 8 --gpu h100       # what to run: mesh, scheme, memory, time
longspan plan --model qwen3-8b --seq 256k --ranks 8 --memory 80     # a training step of a model: does it fit?
longspan plan --seq 1M --ranks 64 --docs longtail --machine h100    # one attention layer: scheme, bytes, and why
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from longspan.cli import plan_gpus, plan_model
from longspan.cli.output import Column, Row, Screen, bytes_against, print_json, progress, screen_of
from longspan.cli.workload import Workload
from longspan.formatting import bytes_in_one_unit, bytes_text, rate_text, seconds_in_one_unit, seconds_text
from longspan.planning.choose import Reason
from longspan.planning.plan import Plan

add_arguments = plan_model.add_arguments


def run(args: argparse.Namespace) -> int:
    has_model = plan_model.has_model(args)
    if args.gpus is not None:
        return plan_gpus.run(args)
    if has_model:
        return plan_model.run(args)
    workload = Workload.of(args)
    with progress(args, "planning"):
        plan = workload.plan(args.ranks)
    if args.json:
        print_json("plan", {"workload": workload.as_json(), **figures(plan)})
    else:
        show(workload, plan, screen_of(args))
    return 0


def figures(plan: Plan) -> dict[str, Any]:
    """Return the plan's figures for JSON: bytes over all ranks, seconds and peak of those in `figures_of_ranks`."""
    chosen, s = plan.chosen, plan.sizes
    workspaces = [plan.workspace_bytes(rank, deterministic=True) for rank in chosen.ranks]
    slots = plan.layout.local_len or int(plan.layout.num_tokens.max())
    row = (s.q_heads + s.kv_heads) * (s.head_dim + s.v_head_dim)
    flop = 2.0 * (s.head_dim + s.v_head_dim) * float(plan.scheme.work.mean())  # of a rank's pairs, on average
    return {
        "figures_of": "one attention layer",
        "fingerprint": plan.fingerprint,
        "scheme": plan.scheme.name,
        "layout": plan.layout.name,
        "ranks": plan.layout.world_size,
        "imbalance": plan.imbalance,
        "forward_seconds": chosen.forward_seconds,
        "backward_seconds": chosen.backward_seconds,
        "forward_bytes_received": int(plan.scheme.received_bytes("forward", keep=plan.keep).max()),
        "backward_bytes_received": int(plan.scheme.received_bytes("backward", keep=plan.keep).max()),
        "bytes_received": chosen.bytes_received,
        "peak_bytes": chosen.peak_bytes,
        "workspace_bytes": chosen.workspace_bytes,
        "deterministic_workspace_bytes": max_or_none(workspaces),
        "host_seconds": chosen.host_seconds,
        "kernel": plan.machine.kernel,
        "kernel_assumed": plan.kernel_assumed,
        "own_bytes": 2 * slots * s.batch * row * s.itemsize,
        "forward_flops_per_rank": flop / chosen.forward_seconds,
        "figures_of_ranks": list(chosen.ranks),
        "reasons": [reason_json(reason) for reason in plan.reasons],
    }


def max_or_none(values: Sequence[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None


def reason_json(reason: Reason) -> dict[str, Any]:
    """Return one scheme's figures; only the bound if it was not simulated."""
    if reason.at_least:
        return {"scheme": reason.scheme, "chosen": False, "at_least_seconds": reason.seconds}
    names = ("forward_seconds", "backward_seconds", "bytes_received", "peak_bytes", "workspace_bytes", "host_seconds")
    figures = {name: getattr(reason, name) for name in names}
    return {"scheme": reason.scheme, "chosen": reason.chosen, **figures, "figures_of_ranks": list(reason.ranks)}


def show(workload: Workload, plan: Plan, screen: Screen) -> None:
    summary, ranks = figures(plan), plan.layout.world_size
    screen.title(f"{workload.seq_len:,} tokens on {ranks:,} ranks: {plan.scheme.name}")
    received = (
        f"{bytes_text(summary['forward_bytes_received'])} forward, {bytes_text(summary['backward_bytes_received'])}"
    )
    sampled = any(len(reason.ranks) < ranks for reason in plan.reasons if not reason.at_least)
    kept = "remote K/V are kept for backward" if plan.keep else "remote K/V are fetched again; --keep keeps them"
    forward, backward = summary["forward_seconds"], summary["backward_seconds"]
    speed = rate_text(summary["forward_flops_per_rank"], "FLOP/s")
    host = "does the work itself"
    if summary["host_seconds"]:
        host = f"busy for {seconds_text(summary['host_seconds'])} with queueing both passes, while the device works"
    screen.facts(
        (
            ("figures", "one attention layer's; --model NAME or --config FILE answers for a whole model in training"),
            ("mask", workload.about_docs()),
            ("tensors", workload.about_tensors()),
            ("machine", workload.about_machine()),
            ("kernel", plan.kernel_assumed),
            ("layout", f"{plan.layout.name}, imbalance {plan.imbalance:.3f} (most pairs on a rank / mean)"),
            ("received", f"at most {received} backward by any rank ({kept})"),
            ("memory", memory_text(summary, " of the ranks looked at" * sampled)),
            ("predicted", f"{seconds_text(forward)} forward ({speed} a rank), {seconds_text(backward)} backward"),
            ("host", host),
            ("why", why(plan)),
        )
    )  # fmt: skip
    screen.text()
    heads = ("forward", "backward", "host", "received", "peak memory", "in kernels")
    screen.table((Column("scheme", False), *map(Column, heads)), reason_rows(plan.reasons))
    screen.text()
    note = (
        f"Times are simulated on {plan.machine.name} ({plan.machine.kernel or 'kernel not named'}), not measured."
        " Received is the most of any rank, both passes; host is how long queueing takes, while the device works."
    )
    if sampled:
        sample = ", ".join(map(str, summary["figures_of_ranks"]))
        note += (
            " Memory is the largest of ranks likely to be busiest, for each scheme; those of"
            f" {plan.scheme.name} are {sample}. Another rank may need somewhat more."
        )
    screen.notes((note,))


def reason_rows(reasons: Sequence[Reason]) -> list[Row]:
    """Return one row for each scheme; only the bound of those that were not simulated."""
    full = [reason for reason in reasons if not reason.at_least]
    workspaces = [reason.workspace_bytes for reason in full]
    columns = (
        seconds_in_one_unit([reason.forward_seconds for reason in full]),
        seconds_in_one_unit([reason.backward_seconds for reason in full]),
        seconds_in_one_unit([reason.host_seconds for reason in full]),
        bytes_in_one_unit([reason.bytes_received for reason in full]),
        bytes_in_one_unit([reason.peak_bytes for reason in full]),
        ["unknown"] * len(full) if None in workspaces else bytes_in_one_unit([size or 0 for size in workspaces]),
    )
    rows = [Row((reason.scheme, *cells), reason.chosen) for reason, *cells in zip(full, *columns, strict=True)]
    bound = "at least {} in all, for its pairs and bytes alone"
    return rows + [Row((r.scheme,), rest=bound.format(seconds_text(r.seconds))) for r in reasons if r.at_least]


def memory_text(summary: dict[str, Any], sampled: str) -> str:
    """Return peak, workspace of kernels and own tensors."""
    inside = "what kernels allocate inside, which is not known"
    if (size := summary["workspace_bytes"]) is not None:
        inside = f"{bytes_text(size)} inside kernels and in tables"
        if (fixed := summary["deterministic_workspace_bytes"]) != size:
            inside += f" ({bytes_text(fixed)} under use_deterministic_algorithms)"
    own = f"plus {bytes_text(summary['own_bytes'])} of own q, k, v, output and their gradients"
    return f"{bytes_text(summary['peak_bytes'])} at the peak{sampled} + {inside}, {own}"


def why(plan: Plan) -> str:
    """Return why this scheme was chosen, in a sentence."""
    chosen = plan.chosen
    others = [reason for reason in plan.reasons if not reason.chosen]
    if not others:
        return "set by --scheme; --scheme auto compares it with the others"
    second = others[0]
    if second.seconds < chosen.seconds:
        behind = chosen.seconds / second.seconds - 1
        text = f"{behind:.1%} behind {second.scheme}, which is a tie"
        text += ", and with less to do for hosts" if chosen.host_seconds < second.host_seconds else ""
    else:
        ahead = second.seconds / chosen.seconds - 1
        text = f"the quickest of {len(plan.reasons)} schemes, {ahead:.1%} ahead of {second.scheme}"
    full = [reason for reason in others if reason.scheme == "all_gather" and not reason.at_least]
    if full and full[0].bytes_received:
        text += f"; it moves {bytes_against(chosen.bytes_received, full[0].bytes_received, 'all_gather')}"
    return text
