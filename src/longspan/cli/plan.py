"""The plan of one workload on one screen: scheme, bytes, balance, memory, predicted time, and why.

longspan plan --seq 1M --ranks 64 --docs longtail --machine h100

Its figures are one attention's. With a model it answers for the whole training step: see `plan_model`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from longspan.cli import plan_model
from longspan.cli.output import Column, Row, Screen, bytes_against, print_json, progress, screen_of
from longspan.cli.workload import Workload
from longspan.cli.workload import add_arguments as add_workload
from longspan.formatting import bytes_alike, bytes_text, rate_text, seconds_alike, seconds_text
from longspan.planning.choose import Reason
from longspan.planning.plan import Plan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_workload(parser)
    plan_model.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if plan_model.asked(args):
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
    """What the plan says, for JSON; bytes over all ranks, seconds and peak of those in `figures_of_ranks`."""
    chosen = next(reason for reason in plan.reasons if reason.chosen)
    return {
        "figures_of": "one attention layer",
        "fingerprint": plan.fingerprint,
        "scheme": plan.scheme.name,
        "layout": plan.layout.name,
        "ranks": plan.layout.world_size,
        "imbalance": plan.imbalance,
        "forward_seconds": chosen.forward_seconds,
        "backward_seconds": chosen.backward_seconds,
        "forward_bytes_received": int(plan.scheme.received("forward", keep=plan.keep).max()),
        "backward_bytes_received": int(plan.scheme.received("backward", keep=plan.keep).max()),
        "bytes_received": chosen.bytes_received,
        "peak_bytes": chosen.peak_bytes,
        "workspace_bytes": chosen.workspace_bytes,
        "deterministic_workspace_bytes": deterministic_workspace(plan, chosen),
        "host_seconds": chosen.host_seconds,
        "kernel": plan.machine.kernel,
        "kernel_assumed": plan.kernel_assumed,
        "own_bytes": own_bytes(plan),
        "forward_flops_per_rank": forward_flop(plan) / chosen.forward_seconds,
        "figures_of_ranks": list(chosen.ranks),
        "reasons": [as_json(reason) for reason in plan.reasons],
    }


def as_json(reason: Reason) -> dict[str, Any]:
    """One scheme's figures; of those that were not worked out fully, only the bound."""
    if reason.at_least:
        return {"scheme": reason.scheme, "chosen": False, "at_least_seconds": reason.seconds}
    return {
        "scheme": reason.scheme,
        "chosen": reason.chosen,
        "forward_seconds": reason.forward_seconds,
        "backward_seconds": reason.backward_seconds,
        "bytes_received": reason.bytes_received,
        "peak_bytes": reason.peak_bytes,
        "workspace_bytes": reason.workspace_bytes,
        "host_seconds": reason.host_seconds,
        "figures_of_ranks": list(reason.ranks),
    }


def deterministic_workspace(plan: Plan, chosen: Reason) -> int | None:
    """The largest workspace of the ranks that were looked at, under `torch.use_deterministic_algorithms`."""
    found = [plan.workspace_bytes(rank, deterministic=True) for rank in chosen.ranks]
    return None if None in found else max(size for size in found if size is not None)


def own_bytes(plan: Plan) -> int:
    """Bytes of q, k, v, the output and all their gradients on the rank with most tokens."""
    s = plan.sizes
    row = s.q_heads * (s.head_dim + s.v_head_dim) + s.kv_heads * (s.head_dim + s.v_head_dim)
    slots = plan.layout.local_len or int(plan.layout.num_tokens.max())
    return 2 * slots * s.batch * row * s.itemsize


def forward_flop(plan: Plan) -> float:
    """Floating-point operations of a rank's pairs, forward, on average."""
    return 2.0 * (plan.sizes.head_dim + plan.sizes.v_head_dim) * float(plan.scheme.work.mean())


def show(workload: Workload, plan: Plan, screen: Screen) -> None:
    """The plan as a person reads it."""
    summary, ranks = figures(plan), plan.layout.world_size
    screen.title(f"{workload.seq_len:,} tokens on {ranks:,} ranks: {plan.scheme.name}")
    received = (
        f"{bytes_text(summary['forward_bytes_received'])} forward, {bytes_text(summary['backward_bytes_received'])}"
    )
    sampled = any(len(reason.ranks) < ranks for reason in plan.reasons if not reason.at_least)
    kept = "remote K/V are kept for backward" if plan.keep else "remote K/V are fetched again; --keep keeps them"
    forward, backward = summary["forward_seconds"], summary["backward_seconds"]
    speed = rate_text(summary["forward_flops_per_rank"], "FLOP/s")
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
            ("host", host_text(summary["host_seconds"])),
            ("why", why(plan)),
        )
    )  # fmt: skip
    screen.text()
    screen.table(
        (
            Column("scheme", False),
            *map(Column, ("forward", "backward", "host", "received", "peak memory", "in kernels")),
        ),
        reason_rows(plan.reasons),
    )
    screen.text()
    note = (
        f"Times are simulated on {plan.machine.name} ({plan.machine.kernel or 'kernel not named'}), not measured."
        " Received is the most of any rank, both passes; host is how long queueing takes, beside the device."
    )
    if sampled:
        sample = ", ".join(map(str, summary["figures_of_ranks"]))
        note += (
            " Times and memory are the largest of ranks likely to be busiest, for each scheme; those of"
            f" {plan.scheme.name} are {sample}. Another rank may take somewhat more."
        )
    screen.notes((note,))


def reason_rows(reasons: Sequence[Reason]) -> list[Row]:
    """One row for each scheme; of those that were not worked out fully, only the bound."""
    full = [reason for reason in reasons if not reason.at_least]
    columns = (
        seconds_alike([reason.forward_seconds for reason in full]),
        seconds_alike([reason.backward_seconds for reason in full]),
        seconds_alike([reason.host_seconds for reason in full]),
        bytes_alike([reason.bytes_received for reason in full]),
        bytes_alike([reason.peak_bytes for reason in full]),
        workspaces_alike(full),
    )
    rows = [Row((reason.scheme, *cells), reason.chosen) for reason, *cells in zip(full, *columns, strict=True)]
    bound = "at least {} in all, for its bytes alone"
    return rows + [Row((r.scheme,), rest=bound.format(seconds_text(r.seconds))) for r in reasons if r.at_least]


def workspaces_alike(reasons: Sequence[Reason]) -> list[str]:
    """What kernels allocate inside themselves, all in one unit; "unknown" where a kernel does not tell."""
    sizes = [reason.workspace_bytes for reason in reasons]
    return ["unknown"] * len(sizes) if None in sizes else bytes_alike([size for size in sizes if size is not None])


def memory_text(summary: dict[str, Any], of_whom: str) -> str:
    """State, workspace and own tensors, apart."""
    inside = "what kernels allocate inside, which is not known"
    if (size := summary["workspace_bytes"]) is not None:
        inside = f"{bytes_text(size)} inside kernels and in tables"
        if (fixed := summary["deterministic_workspace_bytes"]) != size:
            inside += f" ({bytes_text(fixed)} under use_deterministic_algorithms)"
    own = f"beside {bytes_text(summary['own_bytes'])} of own q, k, v, output and their gradients"
    return f"{bytes_text(summary['peak_bytes'])} at the peak{of_whom} + {inside}, {own}"


def host_text(seconds: float) -> str:
    if not seconds:
        return "does the work itself"
    return f"busy for {seconds_text(seconds)} with queueing both passes, beside the device"


def why(plan: Plan) -> str:
    """Why this scheme, in a sentence."""
    chosen = next(reason for reason in plan.reasons if reason.chosen)
    others = [reason for reason in plan.reasons if not reason.chosen]
    if not others:
        return f"{plan.scheme.name} was asked for; --scheme auto compares it with the others"
    second = others[0]
    if second.seconds < chosen.seconds:  # a tie, which hosts decided
        text = (
            f"{chosen.seconds / second.seconds - 1:.1%} behind {second.scheme}, which is a tie, and with less to do for"
        )
        text += " hosts"
    else:
        text = f"the quickest of {len(plan.reasons)} schemes, {second.seconds / chosen.seconds - 1:.1%} ahead of"
        text += f" {second.scheme}"
    full = [reason for reason in others if reason.scheme == "all_gather" and not reason.at_least]
    if full and full[0].bytes_received:
        text += f"; it moves {bytes_against(chosen.bytes_received, full[0].bytes_received, 'all_gather')}"
    return text
