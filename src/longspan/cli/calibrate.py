"""Measures kernels, copies, links and whole attentions on the ranks of torchrun and writes a Machine file.

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

from longspan.cli.launch import JobRanks, add_backend, joined
from longspan.cli.output import Screen, count, print_json, progress, screen_of, to_write
from longspan.formatting import rate_text, seconds_text
from longspan.planning.machine import CPU, Link, Machine, machine_text, nearest
from longspan.planning.steps import ITEMSIZE, Sizes

EVERYBODY = 1 << 30
NUM_PARTS = 12
"""About how often `measure` says what it is at."""


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
    joining = joined("calibrate", args.backend)
    with joining as ranks, progress(args, "measuring", NUM_PARTS, speaks=ranks.speaks) as advance:
        machine, about = measure(ranks, sizes, args.dtype, args.rounds, args.name, advance)
    if not ranks.speaks:
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
    """The machine that these ranks run on; unless `whole`, measured by bare kernels, copies and links alone."""
    import torch

    from longspan.cli.measure import SMALL, Tensors, copy_rate, kernel_rate, kernel_times, measure_and_fit, wire

    tensors = Tensors(sizes, getattr(torch, dtype), ranks.device)
    base = _base(ranks, tensors.kernel.name)
    times = kernel_times(ranks, tensors, rounds, advance)
    forward = kernel_rate(times.forward, sizes, base, "forward")
    backward = kernel_rate(times.backward, sizes, base, "backward")
    advance("copies")
    copies = copy_rate(ranks, rounds)
    # Hops to the next rank stay in a host for most ranks; hops of a host's size never do.
    inside = min(ranks.local_size, ranks.size)
    links = [Link(EVERYBODY, *_link(wire(ranks, 1, rounds, advance)))] if ranks.size > 1 else list(base.links)
    if 1 < inside < ranks.size:
        links = [replace(links[0], ranks=inside), Link(EVERYBODY, *_link(wire(ranks, inside, rounds, advance)))]
    flops = max(forward, backward)
    calls = (times.forward[SMALL, 1, False] + times.backward[SMALL, 1, False]) / 2
    assumed = taken_over(base, on_gpu=ranks.device != "cpu", alone=ranks.size == 1)
    source = (
        f"measured by longspan calibrate: {ranks.size} ranks at once, {inside} a host with {os.cpu_count()} cores,"
        f" {torch.get_num_threads()} threads a rank, kernel {times.name}, {dtype},"
        f" {sizes.q_heads}:{sizes.kv_heads} heads of {sizes.head_dim}, {ranks.backend}, torch {torch.__version__};"
        f" not measured: {'; '.join(assumed)}"
    )
    machine = replace(
        base, name=name, source=source, flops=flops, forward_share=forward / flops, backward_share=backward / flops,
        copy_bandwidth=copies, op_seconds=calls, slot_seconds=0.0, links=tuple(links),
    )  # fmt: skip
    bare = {"bare_forward_flops": forward, "bare_backward_flops": backward, "bare_call_seconds": calls}
    if ranks.device != "cpu":
        from longspan.cli.measure import host_costs

        machine = host_costs(ranks, machine, sizes, dtype, rounds, advance).put_into(machine)
    if whole:
        machine = measure_and_fit(ranks, machine, sizes, dtype, rounds, advance)
    return machine, _about(machine, times.name, ranks, dtype) | bare | {"assumed": assumed}


def _base(ranks: JobRanks, kernel: str) -> Machine:
    """The preset nearest to what runs here, of which tiles are taken; a GPU's multiprocessors are counted."""
    if ranks.device == "cpu":
        return CPU
    import torch

    from longspan.kernels.cuda_flash import implementation

    facts = torch.cuda.get_device_properties(ranks.device)
    runs = implementation() if kernel in ("varlen", "flash") else {"cudnn": "cuDNN"}.get(kernel, kernel)
    return replace(nearest(facts.major, runs), kernel=runs, slots=facts.multi_processor_count)


def taken_over(base: Machine, *, on_gpu: bool, alone: bool) -> list[str]:
    """What a calibrated machine has from a preset and not from a measurement, in words.

    >>> taken_over(CPU, on_gpu=False, alone=False)
    ['rows and widths of tiles, as in cpu']
    """
    words = [f"rows and widths of tiles, as in {base.name}"]
    words += [f"that a step takes one launch for each window, as in {base.name}"] if on_gpu else []
    return words + ([f"links, as in {base.name}, for there is one rank"] if alone else [])


def _link(link: Any) -> tuple[float, float]:
    return link.bandwidth, link.latency


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


def _rates(about: dict[str, Any], direction: str) -> str:
    bare = rate_text(about[f"bare_{direction}_flops"], "FLOP/s")
    return f"{rate_text(about[f'{direction}_flops'], 'FLOP/s')} a rank in whole attentions, {bare} in bare kernels"


def _by(about: dict[str, Any]) -> str:
    return "" if about["implementation"] == about["kernel"] else f" ({about['implementation']})"


def show(machine: Machine, about: dict[str, Any], out: Path | None, screen: Screen) -> None:
    """What was found, and what to do with it."""
    hosts = f"{about['ranks_per_host']} on a host of {about['cores']} cores"
    screen.title(f"{machine.name}: {about['ranks']} ranks at once on {about['device'].partition(':')[0]}, {hosts}")
    call, bare = seconds_text(about["call_seconds"]), seconds_text(about["bare_call_seconds"])
    facts = [
        ("kernel", f"{about['kernel']}{_by(about)}, {about['dtype']}"),
        ("forward", _rates(about, "forward")),
        ("backward", _rates(about, "backward")),
        ("operation", f"{call}, {bare} of a bare kernel's call"),
        ("copies", rate_text(about["copy_bytes_per_second"], "B/s")),
    ]
    if about["host_launch_seconds"] or about["host_call_seconds"]:
        host = [seconds_text(about[f"host_{name}_seconds"]) for name in ("launch", "message", "call")]
        facts.append(("host", "{} to queue an operation, {} a message, {} a call beside them".format(*host)))
    for link in about["links"]:
        label = "link" if link["ranks"] == EVERYBODY else f"link of {link['ranks']}"
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
