"""Measure kernels, copies, links and whole attention calls on the ranks of torchrun, and write a Machine file.

  torchrun --nproc-per-node 4 -m longspan calibrate --q-heads 8 --kv-heads 2 --head-dim 64 --out machine.json

`plan`, `compare`, `trace` and `bench` read it with --machine machine.json. Measure with as many ranks on a host as will
run there: ranks that share cores share their speed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from longspan.cli.launch import JobRanks, add_backend, join_ranks
from longspan.cli.output import Screen, count, print_json, progress, screen_of, to_write
from longspan.formatting import rate_text, seconds_text
from longspan.planning.machine import CPU, Link, Machine, machine_text, nearest
from longspan.planning.steps import ITEMSIZE, Sizes

ALL_RANKS = 1 << 30
NUM_PARTS = 12
"""About how often `measure` calls `advance`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=to_write(), metavar="FILE", help="where the Machine file goes")
    parser.add_argument("--name", default="calibrated", help="what the machine is called (calibrated)")
    parser.add_argument("--rounds", type=count, default=9, help="rounds of each measurement (9)")
    add_backend(parser)
    tensors = parser.add_argument_group("tensors that kernels are measured on")
    tensors.add_argument("--q-heads", type=count, default=8, help="query heads (8)")
    tensors.add_argument("--kv-heads", type=count, default=8, help="key/value heads (8)")
    tensors.add_argument("--head-dim", type=count, default=64, help="features of a head (64)")
    tensors.add_argument("--dtype", choices=tuple(ITEMSIZE), default="bfloat16", help="(bfloat16)")


def run(args: argparse.Namespace) -> int:
    sizes = Sizes(args.q_heads, args.kv_heads, args.head_dim, args.head_dim, ITEMSIZE[args.dtype])
    with (
        join_ranks("calibrate", args.backend) as ranks,
        progress(args, "measuring", NUM_PARTS, is_main=ranks.is_main) as advance,
    ):
        machine, about = measure(ranks, sizes, args.dtype, args.rounds, args.name, advance)
    if not ranks.is_main:
        return 0
    if args.out is not None:
        args.out.write_text(machine_text(machine))
    if args.json:
        print_json("calibrate", {**about, "file": None if args.out is None else str(args.out)})
    else:
        show(machine, about, args.out, screen_of(args))
    return 0


def measure(
    ranks: JobRanks,
    sizes: Sizes,
    dtype: str,
    rounds: int,
    name: str,
    advance: Callable[[str], None],
    whole: bool = True,
) -> tuple[Machine, dict[str, Any]]:
    """Return the machine that these ranks run on, and a description; without `whole` from bare kernels, copies and
    links only."""
    import torch

    from longspan.cli.measure import SMALL, KernelTimer, copy_rate, fit_host, kernel_rate, link_cost, measure_and_fit

    timer = KernelTimer(sizes, getattr(torch, dtype), ranks)
    kernel, base = timer.kernel.name, CPU
    if ranks.device != "cpu":
        from longspan.kernels import implementation_of

        about_gpu = torch.cuda.get_device_properties(ranks.device)
        runs = implementation_of(kernel)
        base = replace(nearest(about_gpu.major, runs), kernel=runs, slots=about_gpu.multi_processor_count)
    forward_times, backward_times = timer.measure(rounds, advance)
    forward = kernel_rate(forward_times, sizes, base, "forward")
    backward = kernel_rate(backward_times, sizes, base, "backward")
    advance("copies")
    copies = copy_rate(ranks, rounds)
    # A hop to the next rank stays inside a host for most ranks; a hop of a host's size never does.
    inside = min(ranks.local_size, ranks.size)
    links = [Link(ALL_RANKS, *link_cost(ranks, 1, rounds, advance))] if ranks.size > 1 else list(base.links)
    if 1 < inside < ranks.size:
        links = [replace(links[0], ranks=inside), Link(ALL_RANKS, *link_cost(ranks, inside, rounds, advance))]
    flops = max(forward, backward)
    calls = (forward_times[SMALL, 1, False] + backward_times[SMALL, 1, False]) / 2
    assumed = assumptions(base, on_gpu=ranks.device != "cpu", alone=ranks.size == 1)
    source = (
        f"measured by longspan calibrate: {ranks.size} ranks at once, {inside} a host with {os.cpu_count()} cores,"
        f" {torch.get_num_threads()} threads a rank, kernel {kernel}, {dtype},"
        f" {sizes.q_heads}:{sizes.kv_heads} heads of {sizes.head_dim}, {ranks.backend}, torch {torch.__version__};"
        f" not measured: {'; '.join(assumed)}"
    )
    machine = replace(
        base, name=name, source=source, flops=flops, forward_share=forward / flops, backward_share=backward / flops,
        copy_bandwidth=copies, op_seconds=calls, slot_seconds=0.0, links=tuple(links),
    )  # fmt: skip
    bare = {"bare_forward_flops": forward, "bare_backward_flops": backward, "bare_call_seconds": calls}
    if ranks.device != "cpu":
        machine = fit_host(ranks, machine, sizes, dtype, rounds, advance)
    if whole:
        machine = measure_and_fit(ranks, machine, sizes, dtype, rounds, advance)
    return machine, _about(machine, kernel, ranks, dtype) | bare | {"assumed": assumed}


def assumptions(base: Machine, *, on_gpu: bool, alone: bool) -> list[str]:
    """Return what a calibrated machine has from a preset, not from a measurement.

    >>> assumptions(CPU, on_gpu=False, alone=False)
    ['rows and widths of tiles, as in cpu']
    """
    words = [f"rows and widths of tiles, as in {base.name}"]
    words += [f"that a step takes one launch for each window, as in {base.name}"] if on_gpu else []
    return words + ([f"links, as in {base.name}, since there is one rank"] if alone else [])


def _about(machine: Machine, kernel: str, ranks: JobRanks, dtype: str) -> dict[str, Any]:
    return {
        "machine": machine.name,
        "source": machine.source,
        "ranks": ranks.size,
        "ranks_per_host": ranks.local_size,
        "cores": os.cpu_count(),
        "backend": ranks.backend,
        "device": ranks.device,
        "kernel": kernel,
        "implementation": machine.kernel,
        "dtype": dtype,
        "forward_flops": machine.flops * machine.forward_share,
        "backward_flops": machine.flops * machine.backward_share,
        "call_seconds": machine.op_seconds,
        "copy_bytes_per_second": machine.copy_bandwidth,
        "host_launch_seconds": machine.launch_seconds,
        "host_message_seconds": machine.message_seconds,
        "host_call_seconds": machine.call_seconds,
        "links": [
            {"ranks": link.ranks, "bytes_per_second": link.bandwidth, "latency_seconds": link.latency}
            for link in machine.links
        ],
    }


def show(machine: Machine, about: dict[str, Any], out: Path | None, screen: Screen) -> None:
    hosts = f"{about['ranks_per_host']} on a host of {about['cores']} cores"
    screen.title(f"{machine.name}: {about['ranks']} ranks at once on {about['device'].partition(':')[0]}, {hosts}")
    call, bare = seconds_text(about["call_seconds"]), seconds_text(about["bare_call_seconds"])
    runs = "" if about["implementation"] == about["kernel"] else f" ({about['implementation']})"
    rates = {name: rate_text(value, "FLOP/s") for name, value in about.items() if name.endswith("_flops")}
    facts = [
        ("kernel", f"{about['kernel']}{runs}, {about['dtype']}"),
        *(
            (
                name,
                f"{rates[f'{name}_flops']} a rank in whole attentions, {rates[f'bare_{name}_flops']} in bare kernels",
            )
            for name in ("forward", "backward")
        ),
        ("operation", f"{call}, {bare} of a bare kernel's call"),
        ("copies", rate_text(about["copy_bytes_per_second"], "B/s")),
    ]
    if about["host_launch_seconds"] or about["host_call_seconds"]:
        host = [seconds_text(about[f"host_{name}_seconds"]) for name in ("launch", "message", "call")]
        facts.append(("host", "{} to queue an operation, {} a message, {} a call in addition".format(*host)))
    for link in about["links"]:
        label = "link" if link["ranks"] == ALL_RANKS else f"link of {link['ranks']}"
        facts.append(
            (label, f"{rate_text(link['bytes_per_second'], 'B/s')}, {seconds_text(link['latency_seconds'])} a message")
        )
    screen.facts([*facts, ("not measured", "; ".join(about["assumed"]))])
    screen.text()
    screen.notes(
        [f"Wrote {out}. Use it as --machine {out} in plan, compare, trace and bench."]
        if out is not None
        else ["Nothing was written: say --out machine.json to keep it."]
    )
