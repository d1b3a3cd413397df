"""Schemes, memory, time and traffic of a run, before it is run.

longspan plan --seq 1M --ranks 64 --docs longtail --machine h100    # one attention layer: every scheme, and PyTorch's
longspan plan --model qwen3-8b --seq 256k --ranks 8 --memory 80     # a training step of a model: does it fit?
longspan plan --model qwen3-8b --seq 256k --gpus 8 --gpu h100       # what to run: mesh, scheme, memory, time
longspan plan --batches 64k --docs lengths.npy --ranks 64           # a dataset: all ranks, or dp x cp
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

from longspan.cli import plan_batches, plan_gpus, plan_model
from longspan.cli.output import Row, print_facts, print_json, print_table, print_text
from longspan.cli.workload import Workload
from longspan.errors import PlanError
from longspan.formatting import bytes_in_one_unit, bytes_text, rate_text, seconds_in_one_unit, seconds_text
from longspan.planning.choose import TIE, Reason
from longspan.planning.plan import Plan, PlanRequest, build_plan
from longspan.planning.steps import Role, Sizes

add_arguments = plan_model.add_arguments


def run(args: argparse.Namespace) -> int:
    has_model = plan_model.has_model(args)
    if args.batches is not None:
        if has_model:
            raise PlanError("--batches is of one attention layer, and must not be set with a model. Leave one out.")
        return plan_batches.run(args)
    if has_model:
        return (plan_model if args.gpus is None else plan_gpus).run(args)
    workload = Workload.of(args)
    plan = workload.plan(args.ranks)
    torch = best_of_torch(workload, plan)
    if args.json:
        theirs = {"layout": torch.layout, "imbalance": torch.imbalance, **reason_json(torch.reason)}
        print_json("plan", {"workload": workload.as_json(), **figures(plan), "pytorch": theirs})
    else:
        show(workload, plan, torch)
    return 0


# -- PyTorch's own -----------------------------------------------------------------------------------------------------


MAX_SPANS = 1 << 17
"""Spans of a layout up to which the per-document balancer is priced."""


@dataclass(frozen=True)
class TorchRow:
    """What PyTorch's context parallelism of flex attention does with the layout of one of its load balancers.

    Its ring and all-gather of scaled_dot_product_attention fetch K and V again in backward and send float32 gradients:
    where they take the mask at all, they receive more and are predicted to be slower.
    """

    layout: str
    imbalance: float
    reason: Reason

    @property
    def name(self) -> str:
        return f"PyTorch flex, {self.layout}"


class _FlexSizes(Sizes):
    """Sizes for PyTorch's flex attention, which sums gradients of K and V over ranks in the dtype of the tensors."""

    __slots__ = ()

    def row_bytes(self, role: Role) -> int:
        return super().row_bytes(Role.KV if role is Role.DKV else role)


def best_of_torch(workload: Workload, plan: Plan) -> TorchRow:
    """Return the quickest of head-tail (zigzag), no and a per-document balancer; of those within 1%, which the model
    cannot distinguish, the one with fewest bytes. K and V are gathered once, and kept."""
    ranks, documents = plan.layout.world_size, len(workload.lengths)
    sizes, rows = _FlexSizes(*astuple(plan.sizes)), list[TorchRow]()
    names = ["zigzag", "contiguous", *["per_document"] * (1 < documents < MAX_SPANS / (2 * ranks))]
    if documents == 1 and workload.window is None:  # which of them is best is known
        names = ["contiguous" if workload.docs == "full" else "zigzag"]
    for name in names:
        layout = workload.layout(ranks, name)
        request = PlanRequest(
            layout, sizes, plan.dtype, "all_gather", plan.machine, plan.machine_assumed, keep=True
        )  # fmt: skip
        found = build_plan(workload.mask, request)
        rows.append(TorchRow(name, found.imbalance, found.chosen))
    limit = min(row.reason.seconds for row in rows) * (1 + TIE)
    tied = [row for row in rows if row.reason.seconds <= limit]
    return min(tied, key=lambda row: (row.reason.bytes_received, row.reason.peak_bytes))


# -- JSON --------------------------------------------------------------------------------------------------------------


def figures(plan: Plan) -> dict[str, Any]:
    """Return the plan's figures for JSON: bytes over all ranks, seconds and peak of those in `figures_of_ranks`."""
    chosen, s = plan.chosen, plan.sizes
    workspaces = [plan.workspace_bytes(rank, deterministic=True) for rank in chosen.ranks]
    known = [size for size in workspaces if size is not None]
    slots = plan.layout.local_len or int(plan.layout.num_tokens.max())
    row = (s.q_heads + s.kv_heads) * (s.head_dim + s.v_head_dim)
    flop = 2.0 * (s.head_dim + s.v_head_dim) * float(plan.scheme.work.mean())  # of a rank's pairs, on average
    return {
        **reason_json(chosen),
        "figures_of": "one attention layer",
        "fingerprint": plan.fingerprint,
        "scheme": plan.scheme.name,
        "layout": plan.layout.name,
        "ranks": plan.layout.world_size,
        "imbalance": plan.imbalance,
        "forward_bytes_received": int(plan.scheme.received_bytes("forward", keep=plan.keep).max()),
        "backward_bytes_received": int(plan.scheme.received_bytes("backward", keep=plan.keep).max()),
        "deterministic_workspace_bytes": max(known) if len(known) == len(workspaces) else None,
        "kernel": plan.machine.kernel,
        "kernel_assumed": plan.kernel_assumed,
        "own_bytes": 2 * slots * s.batch * row * s.itemsize,
        "forward_flops_per_rank": flop / chosen.forward_seconds,
        "reasons": [reason_json(reason) for reason in plan.reasons],
    }


def reason_json(reason: Reason) -> dict[str, Any]:
    """Return one scheme's figures; only the bound if it was not simulated."""
    if reason.at_least:
        return {"scheme": reason.scheme, "chosen": False, "at_least_seconds": reason.seconds}
    names = ("forward_seconds", "backward_seconds", "bytes_received", "peak_bytes", "workspace_bytes", "host_seconds")
    figures = {name: getattr(reason, name) for name in names}
    return {"scheme": reason.scheme, "chosen": reason.chosen, **figures, "figures_of_ranks": list(reason.ranks)}


# -- The screen --------------------------------------------------------------------------------------------------------


def show(workload: Workload, plan: Plan, torch: TorchRow) -> None:
    summary, ranks = figures(plan), plan.layout.world_size
    print_text(f"{workload.seq_len:,} tokens on {ranks:,} ranks: {plan.scheme.name}")
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
    print_facts(
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
            ("PyTorch", against(plan.chosen, torch)),
        )
    )  # fmt: skip
    print_text()
    heads = ("scheme", "forward", "backward", "host", "received", "peak memory", "in kernels")
    print_table(heads, scheme_rows([(reason.scheme, reason) for reason in plan.reasons] + [(torch.name, torch.reason)]))
    note = (
        f"Times are simulated on {plan.machine.name} ({plan.machine.kernel or 'kernel not named'}), not measured."
        " Received is the most of any rank, both passes; host is how long queueing takes, while the device works."
        " PyTorch's row is its best, with its bytes, and our kernels, copies and overlap."
    )
    if workload.seq_len % (128 * ranks):
        note += " PyTorch's flex attention refuses this length: it must be a multiple of 128 x ranks."
    if sampled:
        sample = ", ".join(map(str, summary["figures_of_ranks"]))
        note += (
            " Memory is the largest of ranks likely to be busiest, for each scheme; those of"
            f" {plan.scheme.name} are {sample}. Another rank may need somewhat more."
        )
    print_text(note)


def scheme_rows(reasons: Sequence[tuple[str, Reason]]) -> list[Row]:
    """Return a row for each (name, reason), PyTorch's last; only the bound of those that were not simulated."""
    full = [(name, reason) for name, reason in reasons if not reason.at_least]
    workspaces = [reason.workspace_bytes for _, reason in full]
    columns = (
        seconds_in_one_unit([reason.forward_seconds for _, reason in full]),
        seconds_in_one_unit([reason.backward_seconds for _, reason in full]),
        seconds_in_one_unit([reason.host_seconds for _, reason in full]),
        bytes_in_one_unit([reason.bytes_received for _, reason in full]),
        bytes_in_one_unit([reason.peak_bytes for _, reason in full]),
        ["unknown"] * len(full) if None in workspaces else bytes_in_one_unit([size or 0 for size in workspaces]),
    )
    rows = [Row((name, *cells), reason.chosen) for (name, reason), *cells in zip(full, *columns, strict=True)]
    bound = "at least {} in all, for its pairs and bytes alone"
    bounds = [Row((name,), rest=bound.format(seconds_text(r.seconds))) for name, r in reasons if r.at_least]
    return [*rows[:-1], *bounds, Row(rows[-1].cells)]


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
        return text + (", and with less to do for hosts" if chosen.host_seconds < second.host_seconds else "")
    ahead = second.seconds / chosen.seconds - 1
    return f"the quickest of {len(plan.reasons)} schemes, {ahead:.1%} ahead of {second.scheme}"


def against(chosen: Reason, torch: TorchRow) -> str:
    """Compare PyTorch's best row with the chosen scheme."""
    best = torch.reason
    bytes_ = f" ({times(best.bytes_received / chosen.bytes_received)} as many)" if chosen.bytes_received else ""
    return (
        f"flex over {torch.layout}, its best here, receives {bytes_text(best.bytes_received)}{bytes_} and"
        f" takes {seconds_text(best.seconds)} ({times(best.seconds / chosen.seconds)} as long)"
    )


def times(value: float) -> str:
    """
    >>> times(15.18), times(0.5), times(1234.0)
    ('15.2x', '0.50x', '1,234x')
    """
    return f"{value:,.0f}x" if value >= 99.5 else f"{value:.1f}x" if value >= 1.95 else f"{value:.2f}x"
