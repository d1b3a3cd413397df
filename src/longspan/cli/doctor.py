"""Is this machine fit, and are the answers right? Versions and whether they were tested, kernels, clocks, speed, a
self-check, and advice.

  longspan doctor                                  # one process, all ranks of the self-check inside it
  torchrun --nproc-per-node 4 -m longspan doctor   # with the clocks and links between ranks, on GPUs where there are

Exit code 1: the self-check failed. Untested versions are named, and change no exit code.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from longspan.cli.launch import BACKENDS, JobRanks, add_backend, clocks, describe_device, describe_kernel, join_ranks
from longspan.cli.output import Screen, print_json, progress, screen_of
from longspan.cli.verify import LEGEND, check_row, one_thread, show_shares
from longspan.formatting import format_count, rate_text, seconds_text
from longspan.versions import check_versions

PACKAGES = ("torch", "numpy", "rich", "matplotlib", "transformers", "accelerate")
DTYPES = ("bfloat16", "float32")
SCHEMES = ("exchange", "ring", "all_gather", "all_to_all", "hybrid(2,exchange)")
FAR_CLOCK = 1e-3
SLOW_MESSAGE = 1e-3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="no timings, and a shorter self-check")
    add_backend(parser)


def run(args: argparse.Namespace) -> int:
    with progress(args, "examining", is_main=os.environ.get("RANK", "0") == "0", lines=True) as advance:
        advance("loading PyTorch")
        import torch.distributed  # noqa: F401  # takes seconds
    with (
        join_ranks("doctor", args.backend, alone=True) as ranks,
        progress(args, "examining", num_parts(ranks, args.quick), is_main=ranks.is_main, lines=True) as advance,
    ):
        findings = examine(ranks, args.quick, advance)
    if ranks.is_main:
        if args.json:
            print_json("doctor", findings)
        else:
            show(findings, screen_of(args))
    return 0 if findings["ok"] else 1


def num_parts(ranks: JobRanks, quick: bool) -> int:
    """Return how many times `examine` calls `advance`."""
    checks = len(_cases(ranks, quick))
    if quick:
        return checks
    from longspan.cli.measure import MESSAGES, TILES

    return checks + len(TILES) + 2 + (len(MESSAGES) if ranks.size > 1 else 0)


def examine(ranks: JobRanks, quick: bool, advance: Callable[[str], None]) -> dict[str, Any]:
    """Return all findings, with advice."""
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
    findings["speed"] = None if quick else speed(ranks, advance)
    with one_thread():
        findings["checks"] = list(self_checks(ranks, quick, advance))
    findings["ok"] = all(check["ok"] for check in findings["checks"])
    findings["advice"] = list(advice(findings))
    return findings


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


def speed(ranks: JobRanks, advance: Callable[[str], None]) -> dict[str, float]:
    """Measure what `longspan calibrate` does, in a few rounds."""
    from longspan.cli.calibrate import measure
    from longspan.planning.steps import Sizes

    machine, _ = measure(ranks, Sizes(8, 8, 64, 64, 2), "bfloat16", 3, "doctor", advance, whole=False)
    rates = {
        "forward_flops": machine.flops * machine.forward_share,
        "backward_flops": machine.flops * machine.backward_share,
        "copy_bytes_per_second": machine.copy_bandwidth,
    }
    if ranks.size > 1:
        rates["link_bytes_per_second"] = machine.links[-1].bandwidth
        rates["link_latency_seconds"] = machine.links[-1].latency
    return rates


def _cases(ranks: JobRanks, quick: bool) -> list[tuple[str, str]]:
    """Return dtypes and schemes of the self-check."""
    schemes = SCHEMES[:2] if quick else SCHEMES
    is_even = ranks.size == 1 or ranks.size % 2 == 0
    names = [name for name in schemes if is_even or not name.startswith("hybrid")]
    return [(dtype, name) for dtype in (DTYPES[:1] if quick else DTYPES) for name in names]


def self_checks(ranks: JobRanks, quick: bool, advance: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Compare small attention calls over ranks with dense float64, by `longspan.verification.verify`."""
    import torch.distributed as dist

    from longspan import layouts, masks
    from longspan.api import attention, plan
    from longspan.verification import loopback_attention, verify

    size = ranks.size if ranks.size > 1 else 4
    mask = masks.documents([150, 9, 201]) & masks.causal() & masks.sliding_window(127)
    layout = layouts.balanced(mask, world_size=size)
    group = dist.group.WORLD if ranks.size > 1 else None
    for dtype, name in _cases(ranks, quick):
        advance(f"{name}, {dtype}")
        scheme_plan = plan(mask, layout, q_heads=4, kv_heads=2, head_dim=32, dtype=dtype, scheme=name)

        def call(q: Any, k: Any, v: Any, scheme_plan: Any = scheme_plan) -> Any:
            if group is None:
                return loopback_attention(q, k, v, scheme_plan)
            return attention(q, k, v, scheme_plan, group=group)

        probes = 1 if quick else 3
        report = verify(call, None, scheme_plan, group=group, probes=probes, device=ranks.device)
        kernel = describe_kernel(scheme_plan.sizes, dtype, ranks.device)
        text = "" if report.ok else str(report)
        yield {**check_row(report, name, dtype), "ranks": size, "kernel": kernel, "text": text}


def advice(findings: dict[str, Any]) -> Iterator[str]:
    """Yield what to change, most urgent first."""
    host, link = findings["host"], findings["speed"] or {}
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
        yield f"Clocks of ranks {far} differ from rank 0's by over a millisecond: `bench` corrects for it, logs do not."
    if link.get("link_latency_seconds", 0.0) > SLOW_MESSAGE:
        yield "A message takes over a millisecond: prefer schemes with few steps (exchange, all_to_all) to rings."
    if host["ranks"] == 1:
        yield "There is only one process: run this under torchrun to examine the ranks' clocks and links."
    for name in ("rich", "matplotlib"):
        if findings["versions"][name] is None:
            yield f"{name} is not installed: {'plain tables' if name == 'rich' else 'no pictures'}. It is optional."


def headline(findings: dict[str, Any]) -> str:
    """Return the verdict; untested versions are not called fit, though the self-check passed.

    >>> headline({"ok": True, "tested": {"tested": True}}), headline({"ok": True, "tested": {"tested": False}})
    ('fit', 'right in the self-check, on versions that were NOT tested')
    """
    if not findings["ok"]:
        return "NOT FIT"
    return "fit" if findings["tested"]["tested"] else "right in the self-check, on versions that were NOT tested"


def show(findings: dict[str, Any], screen: Screen) -> None:
    screen.title(f"longspan {findings['versions']['longspan']}: {headline(findings)}")
    screen.facts(list(_facts(findings)))
    screen.text()
    show_shares(findings["checks"], screen)
    screen.text()
    for check in findings["checks"]:
        if not check["ok"]:
            screen.text(f"FAILED: {check['scheme']}, {check['dtype']}: {check['text']}")
    screen.notes((LEGEND,))
    if findings["advice"]:
        screen.text()
        for line in findings["advice"]:
            screen.text(f"- {line}")


def _facts(findings: dict[str, Any]) -> Iterator[tuple[str, str]]:
    host, rates, checks = findings["host"], findings["speed"], findings["checks"]
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
    if rates is not None:
        forward, backward = (rate_text(rates[f"{name}_flops"], "FLOP/s") for name in ("forward", "backward"))
        copies = rate_text(rates["copy_bytes_per_second"], "B/s")
        yield "speed", f"{forward} forward, {backward} backward, copies {copies}, a rank"
        if "link_bytes_per_second" in rates:
            latency = seconds_text(rates["link_latency_seconds"])
            yield "links", f"{rate_text(rates['link_bytes_per_second'], 'B/s')}, {latency} a message"
    how = f"over {BACKENDS[host['backend']]}" if host["ranks"] > 1 else "in one process"
    how += "" if host["device"] == "cpu" else f", on {host['device']} and its like"
    names = ", ".join(dict.fromkeys(check["kernel"] for check in checks if "kernel" in check))
    good = sum(check["ok"] for check in checks)
    yield "self-check", f"{good} of {len(checks)} attentions equal dense float64, gradients too, {how}, by {names}"
