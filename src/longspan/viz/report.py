"""A report: one HTML file that explains a plan to a colleague: choices, reasons, pictures, numbers, how to repeat."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from longspan.formatting import bytes_text, count_text, rate_text, seconds_text, three
from longspan.planning.choose import Reason, busiest
from longspan.planning.kernel_memory import about_kernel
from longspan.planning.machine import Machine
from longspan.planning.plan import Plan
from longspan.viz.layout import MAX_RANKS, layout_picture, runs
from longspan.viz.mask import mask_name, mask_picture, stretches
from longspan.viz.memory import memory_picture
from longspan.viz.scene import FONT, Scene, escaped
from longspan.viz.timeline import timeline_picture
from longspan.viz.traffic_table import traffic_picture

# Self-contained HTML: everything that is not markup of ours is escaped, nothing is fetched, nothing is run.


_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"

_STYLE = (
    """
:root { color-scheme: light dark; --ink: #1f2328; --muted: #59636e; --line: #d5dae0; --soft: #f6f7f9; --paper: #fff;
  --accent: #0072b2; --good: #e5f1f8; }
@media screen and (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --muted: #9aa4af; --line: #3a424b;
  --soft: #1c2127; --paper: #15191e; --accent: #56b4e9; --good: #16303f; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 58rem; padding: 2.2rem 1.4rem 3rem; background: var(--paper); color: var(--ink);
  font: 16px/1.55 """
    + FONT
    + """; overflow-wrap: break-word; }
h1 { font-size: 1.75rem; line-height: 1.25; margin: 0 0 .4rem; }
h2 { font-size: 1.2rem; margin: 2.4rem 0 .6rem; padding-top: .9rem; border-top: 1px solid var(--line); }
p { margin: .6rem 0; max-width: 46rem; }
.lead { font-size: 1.08rem; }
.muted, figcaption, footer { color: var(--muted); font-size: .92rem; }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: .7rem; margin: 1.3rem 0; }
.card { background: var(--soft); border: 1px solid var(--line); border-radius: .5rem; padding: .7rem .9rem; }
.card span { display: block; line-height: 1.3; margin-top: .2rem; }
.card b { display: block; font-size: 1.3rem; line-height: 1.3; font-variant-numeric: tabular-nums; }
.card span { color: var(--muted); font-size: .86rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .32rem .7rem; border-bottom: 1px solid var(--line); vertical-align: top; }
table:not(.facts) td { white-space: nowrap; }
th { color: var(--muted); font-weight: 600; }
th:first-child, td:first-child { text-align: left; }
table.facts th { text-align: left; width: 11rem; }
table.facts td { text-align: left; }
tr.chosen td { background: var(--good); font-weight: 600; }
.bar { display: block; height: .35rem; margin-top: .2rem; background: var(--accent); border-radius: .2rem; }
figure { margin: 1.4rem 0 0; overflow-x: auto; }
figure svg { display: block; width: 100%; height: auto; border: 1px solid var(--line); border-radius: .5rem; }
figcaption { margin: .5rem 0 0; max-width: 46rem; }
pre { background: var(--soft); border: 1px solid var(--line); border-radius: .5rem; padding: .8rem 1rem;
  white-space: pre-wrap; overflow-wrap: anywhere;
  font: .86rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.note { border-left: .25rem solid #e69f00; background: var(--soft); padding: .6rem .9rem; }
footer { margin-top: 3rem; border-top: 1px solid var(--line); padding-top: .8rem; }
@media screen and (max-width: 42rem) { figure svg { min-width: 40rem; } table.facts th { width: 7rem; } }
@media print { body { print-color-adjust: exact; -webkit-print-color-adjust: exact; max-width: none;
    padding: 0; font-size: 11pt; }
  figure, tr, .card, pre { break-inside: avoid; }
  h2 { break-after: avoid; } .wide { overflow: visible; } }
"""
)


def page(title: str, body: str) -> str:
    """A whole HTML file around a body that is escaped already."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escaped(_POLICY)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n<link rel="icon" href="data:,">\n'
        f"<title>{escaped(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def figure(scene: Scene, caption: str = "") -> str:
    """A picture with its caption."""
    words = f"<figcaption>{escaped(caption)}</figcaption>" if caption else ""
    return f"<figure>{scene.svg()}{words}</figure>"


def cards(facts: Iterable[tuple[str, str]]) -> str:
    """Figures that catch the eye: value, and what it is."""
    parts = (f'<div class="card"><b>{escaped(value)}</b><span>{escaped(what)}</span></div>' for value, what in facts)
    return '<div class="cards">' + "".join(parts) + "</div>"


def facts_table(facts: Iterable[tuple[str, str]]) -> str:
    """Names and what is to be said about each."""
    lines = (f"<tr><th>{escaped(name)}</th><td>{escaped(text)}</td></tr>" for name, text in facts)
    return '<div class="wide"><table class="facts">' + "".join(lines) + "</table></div>"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], chosen: int | None = None) -> str:
    """Rows under heads, one of them marked; cells are text, and `bar` cells are markup."""
    head = "".join(f"<th>{escaped(name)}</th>" for name in heads)
    lines: list[str] = []
    for number, row in enumerate(rows):
        mark = ' class="chosen"' if number == chosen else ""
        cells = "".join(f"<td>{_cell(cell)}</td>" for cell in row)
        lines.append(f"<tr{mark}>{cells}</tr>")
    return f'<div class="wide"><table><tr>{head}</tr>' + "".join(lines) + "</table></div>"


class Bar(str):
    """A cell's words with a bar below them, as long as `share` says."""

    share: float = 0.0

    @staticmethod
    def of(words: str, share: float) -> Bar:
        bar = Bar(words)
        bar.share = share
        return bar


def _cell(cell: str) -> str:
    if isinstance(cell, Bar):
        return f'{escaped(cell)}<span class="bar" style="width:{100 * cell.share:.1f}%"></span>'
    return escaped(cell)


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph of text."""
    mark = f' class="{escaped(kind)}"' if kind else ""
    return f"<p{mark}>{escaped(text)}</p>"


def heading(text: str) -> str:
    """The head of a section."""
    return f"<h2>{escaped(text)}</h2>"


def code(text: str) -> str:
    """Lines to be copied."""
    return f"<pre>{escaped(text)}</pre>"


def picture_page(scene: Scene, caption: str = "") -> str:
    """A page with one picture."""
    return page(scene.title, f"<h1>{escaped(scene.title)}</h1>{figure(scene, caption)}")


# -- The report --------------------------------------------------------------------------------------------------------


_ROWS = 16
"""Ranks that the table lists one by one."""


def report_html(
    plan: Plan,
    *,
    title: str | None = None,
    command: str | None = None,
    python: str | None = None,
    asked: tuple[tuple[str, str], ...] = (),
    version: str = "",
) -> str:
    """The report of a plan as the text of a self-contained HTML file.

    `asked` are further lines about what was asked for; `command` and `python` say how to get the same plan again.
    """
    name = title or f"{count_text(plan.layout.seq_len)} tokens on {plan.layout.world_size} ranks"
    maker = f"longspan {version}".strip()
    parts = [
        f"<h1>{escaped(name)}</h1>",
        paragraph(_lead(plan), "lead"),
        cards(_cards(plan)),
        paragraph(
            f"Times are simulated on the machine {plan.machine.name}, for {plan.kernel_assumed}; nothing here was run"
            " on a GPU. Bytes follow from the plan and are what the transport sends.",
            "note",
        ),
        heading("What was asked"),
        facts_table((*_asked(plan), *asked)),
        heading("What was chosen, and why"),
        *_choice(plan),
        heading("Pictures"),
        *_pictures(plan),
        heading("Numbers"),
        *_numbers(plan),
        heading("The machine"),
        *_machine(plan.machine, plan.machine_assumed),
        heading("How to repeat it"),
        *_repeat(plan, command, python),
        f"<footer>{escaped(maker)}, plan {escaped(plan.fingerprint)}. Made without network or scripts.</footer>",
    ]
    return page(name, "\n".join(parts))


def _chosen(plan: Plan) -> Reason:
    return next(reason for reason in plan.reasons if reason.chosen)


def _most(plan: Plan) -> tuple[int, int]:
    """The most bytes a rank receives in both passes, and the highest peak: that of all ranks, or of those looked at."""
    chosen = _chosen(plan)
    if plan.layout.world_size > MAX_RANKS:
        return chosen.bytes_received, chosen.peak_bytes
    received, peaks = _received(plan), _peaks(plan)
    return max(received), max(peaks)


def _received(plan: Plan) -> list[int]:
    return [sum(passes) for passes in zip(*(run.timeline.bytes_received for run in runs(plan)), strict=True)]


def _peaks(plan: Plan) -> list[int]:
    return [max(passes) for passes in zip(*(run.timeline.peak_bytes for run in runs(plan)), strict=True)]


def _lead(plan: Plan) -> str:
    chosen, (received, peak) = _chosen(plan), _most(plan)
    return (
        f"Attention over {count_text(plan.layout.seq_len)} tokens is split over {plan.layout.world_size} ranks by"
        f" {plan.scheme.name}: predicted {seconds_text(chosen.forward_seconds)} forward and"
        f" {seconds_text(chosen.backward_seconds)} backward, with at most {bytes_text(received)} received and"
        f" {bytes_text(peak)} of extra memory on a rank{_of_few(plan, chosen)}."
    )


def _of_few(plan: Plan, chosen: Reason) -> str:
    """Whose memory it is, where not every rank's was worked out."""
    return f" (ranks {', '.join(map(str, chosen.ranks))})" if plan.layout.world_size > MAX_RANKS else ""


def _cards(plan: Plan) -> Iterator[tuple[str, str]]:
    chosen, (received, peak) = _chosen(plan), _most(plan)
    yield plan.scheme.name.replace(",", ", "), "scheme"
    yield seconds_text(chosen.seconds), "forward and backward, predicted"
    yield bytes_text(received), "most received by a rank, both passes"
    yield bytes_text(peak), f"highest peak beside own tensors{_of_few(plan, chosen)}"
    yield _inside(chosen), "of workspace inside kernels, and of tables"
    yield f"{plan.imbalance:.3f}", "most pairs on a rank / mean"


def _inside(reason: Reason) -> str:
    return "unknown" if reason.workspace_bytes is None else bytes_text(reason.workspace_bytes)


def _asked(plan: Plan) -> Iterator[tuple[str, str]]:
    sizes = plan.sizes
    yield "mask", mask_name(plan.mask)
    parts = stretches(plan.mask, plan.layout.seq_len)
    if len(parts) > 1:
        lengths = parts[:, 1] - parts[:, 0]
        yield (
            "documents",
            f"{count_text(len(parts))} that do not see each other, of {count_text(int(lengths.min()))} to"
            f" {count_text(int(lengths.max()))} tokens",
        )
    yield "sequence", f"{count_text(plan.layout.seq_len)} tokens, batch {sizes.batch}"
    dims = str(sizes.head_dim) if sizes.head_dim == sizes.v_head_dim else f"{sizes.head_dim} and {sizes.v_head_dim}"
    yield "heads", f"{sizes.q_heads} query and {sizes.kv_heads} key/value heads of {dims} features, {plan.dtype}"
    yield "layout", f"{plan.layout.name}, {count_text(len(plan.layout.table))} spans on {plan.layout.world_size} ranks"
    yield "remote K/V", "kept for backward" if plan.keep else "fetched again in backward"


def _choice(plan: Plan) -> Iterator[str]:
    chosen, full = _chosen(plan), [reason for reason in plan.reasons if not reason.at_least]
    if not plan.compared:
        yield paragraph(f"The scheme {plan.scheme.name} was asked for by name, so nothing else was compared.")
    else:
        words = f"{len(plan.reasons)} schemes were compared. {chosen.scheme} has the least predicted time."
        if len(full) > 1 and full[1].seconds < chosen.seconds:
            words = (
                f"{len(plan.reasons)} schemes were compared. {full[1].scheme} is predicted to be"
                f" {100 * (1 - full[1].seconds / chosen.seconds):.1f}% quicker than {chosen.scheme}, which is a tie;"
                f" {chosen.scheme} leaves hosts less to do."
            )
        elif len(full) > 1 and chosen.seconds:
            words += f" The next, {full[1].scheme}, takes {_more(full[1].seconds / chosen.seconds)}."
        gather = next((reason for reason in full if reason.scheme == "all_gather"), None)
        most = _most(plan)[0]
        if gather and most and gather is not chosen:
            times = gather.bytes_received / most
            words += f" An all-gather would make the busiest rank receive {three(times)} times the bytes."
        yield paragraph(words)
    longest = max(reason.seconds for reason in plan.reasons) or 1.0
    yield table(
        ("scheme", "forward", "backward", "both", "host", "received", "peak", "in kernels"),
        [_reason_row(reason, longest) for reason in plan.reasons],
        chosen=plan.reasons.index(chosen),
    )
    ranks = ", ".join(map(str, chosen.ranks))
    yield paragraph(
        "Host is how long a host is busy with queueing both passes, beside what its device does. Received is the most"
        " of any rank, both passes together; peak is memory beside a rank's own q, k, v, results and gradients, and"
        " beside what kernels allocate inside. Times and peaks are the largest of ranks likely to be busiest, of"
        f" {chosen.scheme} ranks {ranks}; another may take somewhat more. “At least” marks"
        " schemes whose bytes alone take longer than the one that was chosen.",
        "muted",
    )


def _more(ratio: float) -> str:
    return f"{three(ratio)} times as long" if ratio >= 1.995 else f"{100 * (ratio - 1):.1f}% longer"


def _reason_row(reason: Reason, longest: float) -> tuple[str, ...]:
    share = reason.seconds / longest
    if reason.at_least:
        return reason.scheme, "", "", Bar.of(f"at least {seconds_text(reason.seconds)}", share), "", "", "", ""
    spent = seconds_text(reason.forward_seconds), seconds_text(reason.backward_seconds)
    both = Bar.of(seconds_text(reason.seconds), share)
    host = seconds_text(reason.host_seconds)
    sizes = bytes_text(reason.bytes_received), bytes_text(reason.peak_bytes), _inside(reason)
    return reason.scheme, *spent, both, host, *sizes


def _pictures(plan: Plan) -> Iterator[str]:
    yield figure(
        mask_picture(plan.mask, plan.layout, title="What may attend to what"),
        "Queries go down, keys go right. A tile has the colour of the rank that holds its query rows."
        + (
            f" Under {plan.scheme.name} a rank computes some heads of other ranks' rows, too." * (plan.scheme.heads > 1)
        ),
    )
    yield figure(
        layout_picture(plan.layout, plan.mask, title="Who holds which tokens"),
        "Every token is on exactly one rank, for all layers. Ranks compute the query rows they hold, unless heads are"
        " spread over ranks.",
    )
    if plan.layout.world_size > MAX_RANKS:
        yield paragraph(
            f"Timeline, traffic and memory are left out: they need the steps of every rank, and are drawn for"
            f" {MAX_RANKS} ranks or fewer. The figures of the busiest ranks are in the table below.",
            "note",
        )
        return
    yield figure(
        timeline_picture(plan, title="When every rank computes and receives"),
        "Simulated, message by message, with every wait of one rank for another. The predicted times above leave such"
        " waits out, so this may be a little longer.",
    )
    yield figure(
        traffic_picture(plan, title="Who sends how much to whom"),
        "Columns add up to what each rank receives. In backward, K and V are fetched again unless they were kept, and"
        " their gradients, which are float32 sums, go home.",
    )
    yield figure(
        memory_picture(plan, title="Memory over time"),
        "What the plan itself makes a rank hold: pieces that arrived or are on their way, sums, and copies. What"
        " kernels allocate inside comes on top; see the table above.",
    )


def _numbers(plan: Plan) -> Iterator[str]:
    size = plan.layout.world_size
    drawn = size <= MAX_RANKS
    ranks = range(size)
    if size > _ROWS:
        ranks = sorted({*busiest(plan.scheme), *(_extremes(plan) if drawn else ())})
        which = "those with most pairs, most remote rows, most bytes, the highest peak, the last to finish"
        yield paragraph(f"Of {size} ranks, {which if drawn else 'the busiest'}, the first and the last.")
    work = plan.scheme.work.astype(float)
    share = work / (work.sum() or 1.0)
    heads = ["rank", "tokens", "pairs", "received forward", "received backward", "peak"]
    finished = [run.timeline.finished for run in runs(plan)] if drawn else []
    rows: list[list[str]] = []
    for rank in ranks:
        received = [bytes_text(plan.bytes_received(rank, direction)) for direction in ("forward", "backward")]
        row = [str(rank), count_text(int(plan.layout.num_tokens[rank])), f"{100 * share[rank]:.2f}%", *received]
        rows.append([*row, bytes_text(plan.peak_bytes(rank)), *(seconds_text(times[rank]) for times in finished)])
    yield table([*heads, *(["forward done", "backward done"] if drawn else [])], rows)
    if drawn:
        totals = [sum(run.timeline.bytes_received) for run in runs(plan)]
        yield paragraph(
            f"All ranks together receive {bytes_text(totals[0])} in forward and {bytes_text(totals[1])} in backward"
            f" ({count_text(totals[0])} and {count_text(totals[1])} bytes).",
            "muted",
        )


def _extremes(plan: Plan) -> set[int]:
    """The ranks that receive most, hold most, and finish last."""
    columns: list[list[float]] = [list(run.timeline.finished) for run in runs(plan)]
    columns += [[float(value) for value in values] for values in (_received(plan), _peaks(plan))]
    return {values.index(max(values)) for values in columns}


def _machine(machine: Machine, assumed: bool) -> Iterator[str]:
    if assumed:
        yield paragraph("No machine was named, so this one was assumed.", "note")
    links = [
        f"{rate_text(link.bandwidth, 'B/s')} and {seconds_text(link.latency)} latency"
        + (f" inside a node of {link.ranks}" if link.ranks < 1 << 20 else " to everybody else")
        for link in machine.links
    ]
    shares = f"{machine.forward_share:.3g} of it forward, {machine.backward_share:.3g} backward"
    yield facts_table(
        (
            ("name", machine.name),
            ("source of figures", machine.source),
            ("arithmetic", f"{machine.flops / 1e12:.3g} TFLOP/s a rank, {shares}"),
            ("kernel", about_kernel(machine.kernel)),
            ("copies", f"{rate_text(machine.copy_bandwidth, 'B/s')}; {seconds_text(machine.op_seconds)} per operation"),
            ("host", _host_words(machine)),
            ("links", "; ".join(links)),
        )
    )


def _host_words(machine: Machine) -> str:
    if not machine.launch_seconds:
        return "does the work itself"
    times = (machine.launch_seconds, machine.message_seconds, machine.call_seconds)
    return "queues, ahead of the device: {} per operation, {} per message, {} per call".format(
        *map(seconds_text, times)
    )


def _repeat(plan: Plan, command: str | None, python: str | None) -> Iterator[str]:
    if command:
        yield code(command)
    if python:
        yield code(python)
    yield paragraph(
        f"Plans are pure functions of their arguments: whoever repeats this gets the fingerprint"
        f" {plan.fingerprint[:12]}… again."
    )
