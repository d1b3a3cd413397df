"""How long attention takes, beside how long it was predicted to: links one by one, a machine measured here, whole
passes on it, and how much of the messages is hidden under the computing."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from longspan import layouts, masks
from longspan.api import plan
from longspan.cli.acceptance.lines import AcceptanceLine, Outcome, Site, compared, right, wrong
from longspan.cli.acceptance.programs import BareMessages, RankPrograms, driven, messages_by_step
from longspan.cli.calibrate import measure
from longspan.cli.measure import DIRECTIONS, MeasuredRun, clocks_ahead, time_passes
from longspan.cli.output import times
from longspan.cli.workload import drawn_lengths
from longspan.formatting import bytes_text, rate_text, seconds_text
from longspan.planning.machine import Machine
from longspan.planning.plan import Plan
from longspan.planning.simulator import simulate

BARS = (1.25, 2.0)
"""Times the predicted time from which a line says so, and from which it is red."""
TRIES = 3
"""Other guests of a machine make it slow now and then; what is slow by itself is so every time."""
SLOW_LINK = {"cuda": 4.0, "cpu": 16.0}
"""Times the median of its kind from which a link is red. On CPUs a message waits for a core: on two shared by twenty
busy processes, links of one memory were up to 4.3 times apart in the best of 21 rounds."""
LINK_BYTES = {"cuda": 64 << 20, "cpu": 1 << 20}
LinkSeconds = dict[tuple[int, int], float]
"""By source and target."""
WORKLOADS = ("causal", "documents", "window")


def timing_lines(*, is_gpu: bool) -> list[AcceptanceLine]:
    """Links and calibration first: predictions are made from them."""
    sizes = ("64k", "256k", "1M") if is_gpu else ("4k",)
    lines = [AcceptanceLine("time.links", _links, 2), AcceptanceLine("time.calibration", _calibration, 2)]
    lines += [
        AcceptanceLine(f"time.{word}.{size}", partial(_workload, word, size), 2, is_quick=False)
        for size in sizes
        for word in WORKLOADS
    ]
    return [*lines, AcceptanceLine("time.overlap", _overlap, 2, is_quick=False)]


# -- links ------------------------------------------------------------------------------------------------------------


def _links(site: Site) -> Outcome:
    """Every rank sends to the one so many places on, all at once, as in a step; a link far slower than most is red."""
    kind, group, links = "cuda" if site.is_gpu else "cpu", site.group(), LinkSeconds()
    size, bar = LINK_BYTES[kind], SLOW_LINK[kind]
    memory = torch.zeros(2, size, dtype=torch.uint8, device=site.ranks.device)
    _measure_links(site, group, memory, links)
    for _ in range(TRIES - 1):
        if _slowest(links, site)[0] > bar:  # on all ranks alike: all have the same table
            _measure_links(site, group, memory, links)
    slowest, (src, dst) = _slowest(links, site)
    rates = [rate_text(size / seconds, "B/s") for seconds in sorted({_usual(links, link, site) for link in links})]
    said = f"{len(links)} links, {' inside and '.join(rates)}{' between hosts' if len(rates) > 1 else ''}"
    if slowest > bar:
        rate = rate_text(size / links[src, dst], "B/s")
        return wrong(f"from rank {src} to rank {dst}: {rate}, {times(slowest)} slower than the median of {said}")
    text = f"{said} in messages of {bytes_text(size)}; the slowest takes {times(slowest)} the median"
    return right(text, used=slowest)


def _measure_links(site: Site, group: dist.ProcessGroup, memory: Tensor, links: LinkSeconds) -> None:
    """Brings down the seconds of every link to the best that was seen."""
    size = site.ranks.size
    for hop in range(1, size):
        mine = _quickest(site, partial(_pass_on, group, memory, hop))
        for dst, seconds in enumerate(site.ranks.gather(torch.tensor([mine], dtype=torch.float64))):
            link = (dst - hop) % size, dst
            links[link] = min(links.get(link, math.inf), float(seconds))


def _slowest(links: LinkSeconds, site: Site) -> tuple[float, tuple[int, int]]:
    """The link that is slowest beside others of its kind, and how many times their median it takes."""
    return max((seconds / _usual(links, link, site), link) for link, seconds in links.items())


def _usual(links: LinkSeconds, link: tuple[int, int], site: Site) -> float:
    """The median of links of the same kind: inside of a host, or between hosts."""
    return median(s for other, s in links.items() if _same_host(other, site) == _same_host(link, site))


def _same_host(pair: tuple[int, int], site: Site) -> bool:
    return pair[0] // site.ranks.local_size == pair[1] // site.ranks.local_size


def _quickest(site: Site, act: Callable[[], None], rounds: int = 7) -> float:
    """Seconds of the quickest round: what the link can do, whoever else was at work."""
    act()
    seconds: list[float] = []
    for _ in range(rounds):
        site.ranks.barrier()
        begin = time.perf_counter()
        act()
        site.ranks.finish()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def _pass_on(group: dist.ProcessGroup, memory: Tensor, hop: int) -> None:
    size, rank, (outgoing, incoming) = group.size(), group.rank(), memory
    ops = [
        dist.P2POp(dist.isend, outgoing, group=group, group_peer=(rank + hop) % size),
        dist.P2POp(dist.irecv, incoming, group=group, group_peer=(rank - hop) % size),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


# -- whole passes -----------------------------------------------------------------------------------------------------


def _calibrated(site: Site, *, anew: bool = False) -> Machine:
    """The machine, measured when first asked for; on the rank that speaks fitted to whole attentions."""
    if site.machine is None or anew:
        dtype = str(site.dtype).removeprefix("torch.")
        rounds = 2 if site.quick else 9 if site.is_gpu else 3
        found, _ = measure(site.ranks, site.sizes, dtype, rounds, "calibrated", lambda _: None, whole=not site.quick)
        site.machine = found
    return site.machine


def _calibration(site: Site) -> Outcome:
    machine = _calibrated(site)
    forward, backward = (rate_text(machine.flops * share, "FLOP/s")
                         for share in (machine.forward_share, machine.backward_share))  # fmt: skip
    links = [f"{rate_text(link.bandwidth, 'B/s')}, {seconds_text(link.latency)} a message" for link in machine.links]
    figures = {
        "forward_flops": machine.flops * machine.forward_share,
        "backward_flops": machine.flops * machine.backward_share,
        "copy_bytes_per_second": machine.copy_bandwidth,
        "op_seconds": machine.op_seconds,
        "links": [[link.ranks, link.bandwidth, link.latency] for link in machine.links],
    }
    how = "bare kernels" if site.quick else "whole attentions"
    return right(
        f"{forward} forward, {backward} backward in {how}, {seconds_text(machine.op_seconds)} an operation, links"
        f" {'; '.join(links)}",
        **figures,
    )


def workload_plan(site: Site, word: str, tokens: int, scheme: str = "exchange") -> Plan:
    """The same on every rank, whatever machine it has: the scheme is named."""
    if word == "documents":
        mask = masks.documents(drawn_lengths("longtail", tokens).tolist()) & masks.causal()
    elif word == "window":
        mask = masks.causal(tokens) & masks.sliding_window(tokens // 8)
    elif word == "full":
        mask = masks.full(tokens)
    else:
        mask = masks.causal(tokens)
    s, size = site.sizes, site.ranks.size
    return plan(
        mask, layouts.balanced(mask, world_size=size, seq_len=tokens), q_heads=s.q_heads, kv_heads=s.kv_heads,
        head_dim=s.head_dim, dtype=site.dtype, scheme=scheme,
    )  # fmt: skip


def tokens_of(size: str) -> int:
    """
    >>> tokens_of("64k"), tokens_of("1M")
    (65536, 1048576)
    """
    return int(size[:-1]) << {"k": 10, "M": 20}[size[-1]]


def _workload(word: str, size: str, site: Site) -> Outcome:
    """Measured against predicted, both passes together; what is too slow is measured, and predicted, again."""
    made = workload_plan(site, word, tokens_of(size))
    best: tuple[float, dict[str, float], dict[str, float]] | None = None
    for attempt in range(TRIES):
        machine = _calibrated(site, anew=attempt == TRIES - 1)
        took = _passes(site, made)
        said = {way: simulate(made.schedule(way), machine).seconds for way in DIRECTIONS}
        ratio = sum(took.values()) / sum(said.values())
        if best is None or ratio < best[0]:
            best = ratio, took, said
        # The rank that speaks has the fitted machine, so its word counts for all.
        if float(site.ranks.gather(torch.tensor([ratio], dtype=torch.float64))[0]) <= BARS[min(attempt, 1)]:
            break
    assert best is not None
    ratio, took, said = best
    text = ", ".join(f"{way} {seconds_text(took[way])}, predicted {seconds_text(said[way])}" for way in DIRECTIONS)
    figures = {f"{way}_seconds": took[way] for way in DIRECTIONS}
    figures |= {f"predicted_{way}_seconds": said[way] for way in DIRECTIONS}
    if not site.ranks.speaks:
        return right(text)
    return compared(ratio, BARS, text, **figures)


def _passes(site: Site, made: Plan) -> dict[str, float]:
    found = time_passes(MeasuredRun(made, site.ranks), 3, clocks_ahead(site.ranks))
    return {way: found.median(way) for way in DIRECTIONS}


# -- overlap ----------------------------------------------------------------------------------------------------------


def _overlap(site: Site) -> Outcome:
    """1 if the shorter of computing and sending is hidden under the longer, 0 if they follow each other."""
    made = workload_plan(site, "full", tokens_of("16k" if site.is_gpu else "2k"), "ring")
    ranks, group = site.ranks, site.group()
    programs = RankPrograms.of(made, ranks.rank, ranks.device)
    both = _passes(site, made)
    figures: dict[str, Any] = {}
    words: list[str] = []
    for way in DIRECTIONS:
        bare = BareMessages(messages_by_step(made, ranks.rank, way), group, ranks.device)
        compute = ranks.most(_quickest(site, lambda way=way: driven(programs.program(way)), 3))
        messages = ranks.most(_quickest(site, bare.run, 3))
        hidden = 1 - (both[way] - max(compute, messages)) / min(compute, messages)
        figures |= {f"{way}_overlap": hidden, f"{way}_seconds": both[way], f"{way}_compute_seconds": compute,
                    f"{way}_message_seconds": messages}  # fmt: skip
        words.append(
            f"{way} {hidden:.2f} ({seconds_text(both[way])} for {seconds_text(compute)} of computing and"
            f" {seconds_text(messages)} of messages)"
        )
    text = "; ".join(words)
    if not site.is_gpu:
        return right(f"{text}; processors do both themselves, so this is told, not judged", **figures)
    # Beside the longer of the two, which is what everything would take if all of the shorter one were hidden.
    longer = {way: max(figures[f"{way}_compute_seconds"], figures[f"{way}_message_seconds"]) for way in DIRECTIONS}
    return compared(max(both[way] / longer[way] for way in DIRECTIONS), BARS, text, **figures)
