"""Is this machine fit, and are the answers right? Versions and whether they were tested, kernels, clocks, speed, a
self-check, and advice.

  longspan doctor                                  # one process, all ranks of the self-check inside it
  torchrun --nproc-per-node 4 -m longspan doctor   # with the clocks and links between ranks, on GPUs where there are
  torchrun --nproc-per-node 4 -m longspan doctor --out machine.json   # also measures whole calls, for plan --machine

Measure with as many ranks on a host as will run there: ranks that share cores share their speed. Exit code 1: the
self-check failed. Untested versions are named, and change no exit code.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from longspan.cli.launch import (
    BACKENDS,
    JobRanks,
    add_backend,
    clocks,
    describe_device,
    describe_kernel,
    join_ranks,
    one_thread,
)
from longspan.cli.output import count, print_facts, print_json, print_text, progress, to_write
from longspan.cli.verify import LEGEND, check_row, show_shares
from longspan.formatting import format_count, rate_text, seconds_text
from longspan.planning.machine import Machine, machine_text
from longspan.planning.steps import ITEMSIZE, Sizes
from longspan.versions import check_versions

PACKAGES = ("torch", "numpy", "matplotlib", "transformers", "accelerate")
DTYPES = ("bfloat16", "float32")
SCHEMES = ("exchange", "ring", "all_gather", "all_to_all", "hybrid(2,exchange)")
FAR_CLOCK = 1e-3
SLOW_MESSAGE = 1e-3
ROUNDS, MORE_ROUNDS = 3, 9
"""Of each measurement, without a file and with one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="no timings, and a shorter self-check")
    parser.add_argument("--out", type=to_write(".json"), metavar="FILE", help="write the machine, for plan --machine")
    add_backend(parser)
    tensors = parser.add_argument_group("tensors that kernels are measured on")
    tensors.add_argument("--q-heads", type=count, default=8, help="query heads (8)")
    tensors.add_argument("--kv-heads", type=count, default=8, help="key/value heads (8)")
    tensors.add_argument("--head-dim", type=count, default=64, help="features of a head (64)")
    tensors.add_argument("--dtype", choices=tuple(ITEMSIZE), default="bfloat16", help="(bfloat16)")


def run(args: argparse.Namespace) -> int:
    advance = progress(args, "examining", is_main=os.environ.get("RANK", "0") == "0")
    advance("loading PyTorch")
    with join_ranks(args.backend) as ranks:
        findings, machine = examine(ranks, args, advance)
    if ranks.is_main:
        if args.out is not None and machine is not None:
            args.out.write_text(machine_text(machine))
        if args.json:
            print_json("doctor", findings)
        else:
            show(findings, machine)
            if args.out is not None:
                print_text()
                print_text(f"Wrote {args.out}: longspan plan --machine {args.out} reads it.")
    return 0 if findings["ok"] else 1


def examine(
    ranks: JobRanks, args: argparse.Namespace, advance: Callable[[str], None]
) -> tuple[dict[str, Any], Machine | None]:
    """Return all findings, with advice, and the measured machine."""
    import torch

    from longspan.kernels.cuda_flash import implementation

    installed = versions()
    findings: dict[str, Any] = {"versions": installed, "backends": backends(), "kernels": kernels()}
    tested = check_versions(installed["torch"] or "(of no known version)", installed["transformers"])
    findings["tested"] = asdict(tested)
    findings["flash_implementation"] = implementation()
    findings["host"] = {
        "system": f"{platform.system()} {platform.machine()}",
        "cores": os.cpu_count(),
        "ranks": ranks.size,
        "ranks_per_host": ranks.local_size,
        "backend": ranks.backend,
        "device": ranks.device,
        "threads_per_rank": torch.get_num_threads(),
    }
    findings["clocks"] = [{"ahead_seconds": c.ahead, "round_trip_seconds": c.round_trip} for c in clocks(ranks)]
    machine = None
    if not args.quick or args.out is not None:
        from longspan.cli.measure import measure

        sizes = Sizes(args.q_heads, args.kv_heads, args.head_dim, args.head_dim, ITEMSIZE[args.dtype])
        name, rounds = ("here", ROUNDS) if args.out is None else (args.out.stem, MORE_ROUNDS)
        machine = measure(ranks, sizes, args.dtype, rounds, name, advance, whole=args.out is not None)
    findings["speed"] = None if machine is None else asdict(machine)
    with one_thread():
        findings["checks"] = list(self_checks(ranks, args.quick, advance))
    findings["ok"] = all(check["ok"] for check in findings["checks"])
    findings["advice"] = list(advice(findings))
    return findings, machine


def versions() -> dict[str, str | None]:
    """Return installed versions; None for missing packages."""
    import longspan

    installed: dict[str, str | None] = {"longspan": longspan.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            installed[name] = version(name)
        except PackageNotFoundError:
            installed[name] = None
    return installed


def backends() -> dict[str, bool]:
    import torch
    import torch.distributed as dist

    has_dist = dist.is_available()
    return {
        "gloo": has_dist and dist.is_gloo_available(),
        "nccl": has_dist and dist.is_nccl_available(),
        "cuda": torch.cuda.is_available(),
    }


def kernels() -> dict[str, str]:
    """Return for each kernel "yes", or why it does not take bfloat16 tensors of the best device here."""
    import torch

    from longspan.kernels import kernel_named

    device = "cuda" if torch.cuda.is_available() else "cpu"
    q, k, v = (torch.zeros(1, heads, 16, 64, dtype=torch.bfloat16, device=device) for heads in (4, 2, 2))
    names = ("cpu_flash", "fa3", "fa4", "cudnn_varlen", "varlen", "flash", "efficient", "cudnn", "flex", "reference")
    return {name: kernel_named(name).refuses(q, k, v) or "yes" for name in names}


def self_checks(ranks: JobRanks, quick: bool, advance: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Compare small attention calls over ranks with dense float64, by `longspan.verification.verify`."""
    from longspan import layouts, masks
    from longspan.api import attention, plan
    from longspan.verification import loopback_attention, verify

    size, group = ranks.size if ranks.size > 1 else 4, ranks.group
    mask = masks.documents([150, 9, 201]) & masks.causal() & masks.sliding_window(127)
    layout = layouts.balanced(mask, world_size=size)
    names = [name for name in SCHEMES[: 2 if quick else None] if size % 2 == 0 or not name.startswith("hybrid")]
    for dtype, name in [(dtype, name) for dtype in DTYPES[: 1 if quick else None] for name in names]:
        advance(f"{name}, {dtype}")
        scheme_plan = plan(mask, layout, q_heads=4, kv_heads=2, head_dim=32, dtype=dtype, scheme=name)

        def call(q: Any, k: Any, v: Any, scheme_plan: Any = scheme_plan) -> Any:
            if group is None:
                return loopback_attention(q, k, v, scheme_plan)
            return attention(q, k, v, scheme_plan, group=group)

        report = verify(call, None, scheme_plan, group=group, probes=1 if quick else 3, device=ranks.device)
        kernel = describe_kernel(scheme_plan.sizes, dtype, ranks.device)
        text = "" if report.ok else str(report)
        yield {**check_row(report, name, dtype), "ranks": size, "kernel": kernel, "text": text}


def advice(findings: dict[str, Any]) -> Iterator[str]:
    """Yield what to change, most urgent first."""
    host, speed = findings["host"], findings["speed"]
    if not findings["ok"]:
        yield "The self-check failed: do not train with this installation. Report the text above."
    if not findings["backends"]["gloo"] and not findings["backends"]["nccl"]:
        yield "This torch has neither Gloo nor NCCL, so ranks cannot communicate. Install one that has either."
    if findings["tested"]["advice"] is not None:
        yield findings["tested"]["advice"]
    if findings["backends"]["cuda"]:
        yield "There is a GPU, and Longspan has not been run on any yet: start with `longspan verify` on your model."
    if host["ranks_per_host"] * host["threads_per_rank"] > (host["cores"] or 1):
        yield (
            f"{host['ranks_per_host']} ranks of {host['threads_per_rank']} threads share {host['cores']} cores:"
            f" times here are not those of a cluster."
        )
    far = [r for r, clock in enumerate(findings["clocks"]) if abs(clock["ahead_seconds"]) > FAR_CLOCK]
    if far:
        yield f"Clocks of ranks {far} differ from rank 0's by over a millisecond: compare no logs by their times."
    if host["ranks"] > 1 and speed and speed["links"][-1]["latency"] > SLOW_MESSAGE:
        yield "A message takes over a millisecond: prefer schemes with few steps (exchange, all_to_all) to rings."
    if host["ranks"] == 1:
        yield "There is only one process: run this under torchrun to examine the ranks' clocks and links."
    if findings["versions"]["matplotlib"] is None:
        yield "matplotlib is not installed: no pictures. It is optional."


def headline(findings: dict[str, Any]) -> str:
    """Return the verdict; untested versions are not called fit, though the self-check passed.

    >>> headline({"ok": True, "tested": {"tested": True}}), headline({"ok": True, "tested": {"tested": False}})
    ('fit', 'right in the self-check, on versions that were NOT tested')
    """
    if not findings["ok"]:
        return "NOT FIT"
    return "fit" if findings["tested"]["tested"] else "right in the self-check, on versions that were NOT tested"


def show(findings: dict[str, Any], machine: Machine | None) -> None:
    print_text(f"longspan {findings['versions']['longspan']}: {headline(findings)}")
    print_facts([*_facts(findings), *(_speed_facts(machine, findings["host"]["ranks"]) if machine else ())])
    print_text()
    show_shares(findings["checks"])
    for check in findings["checks"]:
        if not check["ok"]:
            print_text(f"FAILED: {check['scheme']}, {check['dtype']}: {check['text']}")
    print_text(LEGEND)
    for line in findings["advice"]:
        print_text(f"- {line}")


def _facts(findings: dict[str, Any]) -> Iterator[tuple[str, str]]:
    host, checks = findings["host"], findings["checks"]
    installed = [f"{name} {number}" for name, number in findings["versions"].items() if number and name != "longspan"]
    yield "versions", ", ".join(installed)
    yield "tested", findings["tested"]["text"]
    ranks, threads = format_count(host["ranks"], "rank"), format_count(host["threads_per_rank"], "thread")
    yield "host", f"{host['system']}, {host['cores']} cores; {ranks} of {threads}"
    yield "device", describe_device(host["device"])
    yield "backends", ", ".join(f"{name} {'yes' if has else 'no'}" for name, has in findings["backends"].items())
    yield "kernels", ", ".join(name for name, reason in findings["kernels"].items() if reason == "yes")
    if findings["backends"]["cuda"]:
        yield "flash attention", findings["flash_implementation"]
    if host["ranks"] > 1:
        worst = max(abs(clock["ahead_seconds"]) for clock in findings["clocks"])
        trip = max(clock["round_trip_seconds"] for clock in findings["clocks"])
        yield "clocks", f"within {seconds_text(worst)} of rank 0's; there and back in {seconds_text(trip)}"
    how = f"over {BACKENDS[host['backend']]}" if host["ranks"] > 1 else "in one process"
    how += "" if host["device"] == "cpu" else f", on {host['device']} and its like"
    names = ", ".join(dict.fromkeys(check["kernel"] for check in checks))
    good = sum(check["ok"] for check in checks)
    yield "self-check", f"{good} of {len(checks)} attentions equal dense float64, gradients too, {how}, by {names}"


def _speed_facts(machine: Machine, num_ranks: int) -> Iterator[tuple[str, str]]:
    rates = (rate_text(machine.flops * share, "FLOP/s") for share in (machine.forward_share, machine.backward_share))
    copies = rate_text(machine.copy_bandwidth, "B/s")
    yield (
        "speed",
        "{} forward, {} backward, copies {}, a rank; {} an operation".format(
            *rates, copies, seconds_text(machine.op_seconds)
        ),
    )
    if machine.launch_seconds:
        times = map(seconds_text, (machine.launch_seconds, machine.message_seconds, machine.call_seconds))
        yield "host time", "{} to queue an operation, {} a message, {} a call in addition".format(*times)
    for link in machine.links if num_ranks > 1 else ():
        yield "link", f"{rate_text(link.bandwidth, 'B/s')}, {seconds_text(link.latency)} a message"
