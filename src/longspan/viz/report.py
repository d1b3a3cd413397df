"""HTML: a report that explains a plan to a colleague, a page with one picture, and what notebooks show.

Pages are self-contained: everything that is not our own markup is escaped, nothing is fetched, nothing is run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from longspan.errors import LongspanError
from longspan.formatting import bytes_text, count_text, rate_text, seconds_text, three_digits
from longspan.layouts import Layout
from longspan.masks import Mask
from longspan.planning.choose import Reason, busiest
from longspan.planning.kernel_memory import about_kernel
from longspan.planning.machine import Machine
from longspan.planning.plan import Plan
from longspan.planning.scan_plan import ScanPlan
from longspan.viz.mask_and_layout import layout_picture, mask_name, mask_picture, stretches
from longspan.viz.plan_pictures import MAX_RANKS, memory_picture, runs, timeline_picture, traffic_picture
from longspan.viz.scan import scan_picture
from longspan.viz.scene import FONT, Scene, escape

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


def _page(title: str, body: str) -> str:
    """Return a whole HTML file around a body that is escaped already."""
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{escape(_POLICY)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _figure(scene: Scene, caption: str = "") -> str:
    text = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure>{scene.svg()}{text}</figure>"


def facts_html(facts: Iterable[tuple[str, str]]) -> str:
    lines = (f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in facts)
    return '<div class="wide"><table class="facts">' + "".join(lines) + "</table></div>"


def table_html(
    heads: Sequence[str], rows: Iterable[Sequence[str | tuple[str, float]]], chosen: int | None = None
) -> str:
    """Return rows under heads, one of them marked. A cell (text, share) has a bar of that share below its text."""
    lines = ["<tr>" + "".join(f"<th>{escape(name)}</th>" for name in heads) + "</tr>"]
    for number, row in enumerate(rows):
        cells = ""
        for cell in row:
            text, bar = (cell, "") if isinstance(cell, str) else (cell[0], f"width:{100 * cell[1]:.1f}%")
            bar = f'<span class="bar" style="{bar}"></span>' if bar else ""
            cells += f"<td>{escape(text)}{bar}</td>"
        mark = ' class="chosen"' if number == chosen else ""
        lines.append(f"<tr{mark}>{cells}</tr>")
    return '<div class="wide"><table>' + "".join(lines) + "</table></div>"


def paragraph_html(text: str, kind: str = "") -> str:
    mark = f' class="{kind}"' if kind else ""
    return f"<p{mark}>{escape(text)}</p>"


def picture_page(scene: Scene, caption: str = "") -> str:
    """Return an HTML page with one picture."""
    return _page(scene.title, f"<h1>{escape(scene.title)}</h1>{_figure(scene, caption)}")


# -- notebooks ---------------------------------------------------------------------------------------------------------

_LENGTH = 1024
"""Number of tokens for which a mask without a length of its own is drawn."""


def notebook_html(value: Mask | Layout | Plan | ScanPlan) -> str:
    """Return what a notebook shows: a picture, and for plans a table of the schemes that were compared.

    The function of a mask is never called. Without matplotlib, the `repr` is shown.
    """
    try:
        if isinstance(value, Plan):
            title = f"Plan {value.fingerprint[:12]}: {value.scheme.name} of {mask_name(value.mask)}"
            scene = mask_picture(value.mask, value.layout, title=title, ask=False)
        elif isinstance(value, ScanPlan):
            scene = scan_picture(value, title=f"Scan {value.fingerprint[:12]}: {value.scheme}")
        elif isinstance(value, Layout):
            scene = layout_picture(value)
        elif value.seq_len is None:
            title = f"{value!r}, drawn for {count_text(_LENGTH)} tokens"
            scene = mask_picture(value, seq_len=_LENGTH, title=title, ask=False)
        else:
            scene = mask_picture(value, title=repr(value), ask=False)
    except LongspanError as error:
        return f"<pre>{escape(repr(value))}</pre>" + paragraph_html(str(error))
    drawn = f'<div style="max-width:{scene.width:.0f}px;overflow-x:auto">{scene.svg()}</div>'
    if not isinstance(value, Plan):
        return drawn
    heads = ("", "scheme", "forward", "backward", "received", "peak", "in kernels")
    rows: list[tuple[str, ...]] = []
    for reason in value.reasons:
        mark = "✓" if reason.chosen else ""
        if reason.at_least:
            rows.append((mark, reason.scheme, f"at least {seconds_text(reason.seconds)}", "", "", "", ""))
            continue
        times = seconds_text(reason.forward_seconds), seconds_text(reason.backward_seconds)
        num_bytes = bytes_text(reason.bytes_received), bytes_text(reason.peak_bytes), _workspace(reason)
        rows.append((mark, reason.scheme, *times, *num_bytes))
    return (
        drawn
        + table_html(heads, rows)
        + paragraph_html(
            f"Times are simulated on {value.machine.name}, for {value.kernel_assumed}. Bytes are the most of any rank;"
            " memory is of ranks likely to be busiest."
        )
    )


# -- the report --------------------------------------------------------------------------------------------------------

_ROWS = 16
"""Most ranks that the table lists one by one."""


def report_html(
    plan: Plan,
    *,
    title: str | None = None,
    command: str | None = None,
    python: str | None = None,
    extra_inputs: tuple[tuple[str, str], ...] = (),
    section: str = "",
    version: str = "",
) -> str:
    """Return the report of a plan as the text of a self-contained HTML file.

    Args:
        plan: The plan.
        title: Title of the page.
        command: Shell command that makes the same report.
        python: Lines of Python that make the same plan.
        extra_inputs: More (name, text) rows of the table of inputs.
        section: HTML between the figures and the inputs, such as what a whole model needs.
        version: Version of Longspan, for the footer.
    """
    name = title or f"{count_text(plan.layout.seq_len)} tokens on {plan.layout.world_size} ranks"
    chosen = next(reason for reason in plan.reasons if reason.chosen)
    received, peak, of_few = chosen.bytes_received, chosen.peak_bytes, ""
    if plan.layout.world_size <= MAX_RANKS:
        received, peak = max(_received_bytes(plan)), max(_peaks(plan))
    else:
        of_few = f" (ranks {', '.join(map(str, chosen.ranks))})"
    cards = (
        (plan.scheme.name.replace(",", ", "), "scheme"),
        (seconds_text(chosen.seconds), "forward and backward, predicted"),
        (bytes_text(received), "most received by a rank, both passes"),
        (bytes_text(peak), f"highest peak in addition to own tensors{of_few}"),
        (_workspace(chosen), "of workspace inside kernels, and of tables"),
        (f"{plan.imbalance:.3f}", plan.about_imbalance),
    )
    parts = [
        f"<h1>{escape(name)}</h1>",
        paragraph_html(
            f"Attention over {count_text(plan.layout.seq_len)} tokens is split over {plan.layout.world_size} ranks by"
            f" {plan.scheme.name}: predicted {seconds_text(chosen.forward_seconds)} forward and"
            f" {seconds_text(chosen.backward_seconds)} backward, with at most {bytes_text(received)} received and"
            f" {bytes_text(peak)} of extra memory on a rank{of_few}.",
            "lead",
        ),
        '<div class="cards">',
        *(f'<div class="card"><b>{escape(value)}</b><span>{escape(label)}</span></div>' for value, label in cards),
        "</div>",
        paragraph_html(
            f"Times are simulated on the machine {plan.machine.name}, for {plan.kernel_assumed}; nothing here was run"
            " on a GPU. Bytes follow from the plan and are what the transport sends.",
            "note",
        ),
        section,
        "<h2>Inputs</h2>",
        facts_html((*_inputs(plan), *extra_inputs)),
        "<h2>Chosen scheme, and why</h2>",
        *_choice(plan, chosen, received),
        "<h2>Pictures</h2>",
        *_pictures(plan),
        "<h2>Numbers</h2>",
        *_numbers(plan),
        "<h2>Machine</h2>",
        *_machine(plan.machine, plan.machine_assumed),
        "<h2>Reproduce</h2>",
        *(f"<pre>{escape(lines)}</pre>" for lines in (command, python) if lines),
        paragraph_html(
            "Plans are pure functions of their arguments: the same arguments give the fingerprint"
            f" {plan.fingerprint[:12]}… again."
        ),
        f"<footer>{escape(f'longspan {version}'.strip())}, plan {escape(plan.fingerprint)}. Created without"
        " network or scripts.</footer>",
    ]
    return _page(name, "\n".join(parts))


def _received_bytes(plan: Plan) -> list[int]:
    return [sum(passes) for passes in zip(*(run.timeline.bytes_received for run in runs(plan)), strict=True)]


def _peaks(plan: Plan) -> list[int]:
    return [max(passes) for passes in zip(*(run.timeline.peak_bytes for run in runs(plan)), strict=True)]


def _workspace(reason: Reason) -> str:
    return "unknown" if reason.workspace_bytes is None else bytes_text(reason.workspace_bytes)


def _inputs(plan: Plan) -> Iterator[tuple[str, str]]:
    sizes, layout = plan.sizes, plan.layout
    yield "mask", mask_name(plan.mask)
    parts = stretches(plan.mask, layout.seq_len)
    if len(parts) > 1:
        lengths = parts[:, 1] - parts[:, 0]
        shortest, longest = count_text(int(lengths.min())), count_text(int(lengths.max()))
        yield "documents", f"{count_text(len(parts))} that do not see each other, of {shortest} to {longest} tokens"
    yield "sequence", f"{count_text(layout.seq_len)} tokens, batch {sizes.batch}"
    dims = str(sizes.head_dim) if sizes.head_dim == sizes.v_head_dim else f"{sizes.head_dim} and {sizes.v_head_dim}"
    yield "heads", f"{sizes.q_heads} query and {sizes.kv_heads} key/value heads of {dims} features, {plan.dtype}"
    yield "layout", f"{layout.name}, {count_text(len(layout.table))} spans on {layout.world_size} ranks"
    yield "remote K/V", "kept for backward" if plan.keep else "fetched again in backward"


def _choice(plan: Plan, chosen: Reason, most_received: int) -> Iterator[str]:
    full = [reason for reason in plan.reasons if not reason.at_least]
    if not plan.compared:
        text = f"The scheme {plan.scheme.name} was requested by name, so no other was compared."
    elif len(full) > 1 and full[1].seconds < chosen.seconds:
        text = (
            f"{len(plan.reasons)} schemes were compared. {full[1].scheme} is predicted to be"
            f" {100 * (1 - full[1].seconds / chosen.seconds):.1f}% quicker than {chosen.scheme}, which is a tie"
        )
        text += f"; {chosen.scheme} leaves hosts less to do." if chosen.host_seconds < full[1].host_seconds else "."
    else:
        text = f"{len(plan.reasons)} schemes were compared. {chosen.scheme} has the least predicted time."
        if len(full) > 1 and chosen.seconds:
            ratio = full[1].seconds / chosen.seconds
            longer = f"{three_digits(ratio)} times as long" if ratio >= 1.995 else f"{100 * (ratio - 1):.1f}% longer"
            text += f" The next, {full[1].scheme}, takes {longer}."
    gather = next((reason for reason in full if reason.scheme == "all_gather"), None)
    if plan.compared and gather and most_received and gather is not chosen:
        times = three_digits(gather.bytes_received / most_received)
        text += f" An all-gather would make the busiest rank receive {times} times the bytes."
    yield paragraph_html(text)

    longest = max(reason.seconds for reason in plan.reasons) or 1.0
    rows: list[tuple[str | tuple[str, float], ...]] = []
    for reason in plan.reasons:
        share, seconds = reason.seconds / longest, seconds_text(reason.seconds)
        if reason.at_least:
            rows.append((reason.scheme, "", "", (f"at least {seconds}", share), "", "", "", ""))
            continue
        passes = seconds_text(reason.forward_seconds), seconds_text(reason.backward_seconds)
        num_bytes = bytes_text(reason.bytes_received), bytes_text(reason.peak_bytes), _workspace(reason)
        rows.append((reason.scheme, *passes, (seconds, share), seconds_text(reason.host_seconds), *num_bytes))
    heads = ("scheme", "forward", "backward", "both", "host", "received", "peak", "in kernels")
    yield table_html(heads, rows, chosen=plan.reasons.index(chosen))
    yield paragraph_html(
        "Host is how long a host is busy with queueing both passes, in parallel with its device. Received is the most"
        " of any rank, both passes together; peak is memory in addition to a rank's own q, k, v, results and gradients,"
        " and to what kernels allocate inside. Peaks are the largest of ranks likely to be busiest, of"
        f" {chosen.scheme} ranks {', '.join(map(str, chosen.ranks))}; another may need somewhat more. “At least” marks"
        " schemes whose pairs and bytes alone take longer than the chosen scheme.",
        "muted",
    )


def _pictures(plan: Plan) -> Iterator[str]:
    caption = "Queries go down, keys go right. A tile has the colour of the rank that holds its query rows."
    if plan.scheme.heads > 1:
        caption += f" Under {plan.scheme.name} a rank computes some heads of other ranks' rows, too."
    yield _figure(mask_picture(plan.mask, plan.layout, title="What may attend to what"), caption)
    yield _figure(
        layout_picture(plan.layout, plan.mask, title="Who holds which tokens"),
        "Every token is on exactly one rank, for all layers. Ranks compute the query rows they hold, unless heads are"
        " spread over ranks.",
    )
    if plan.layout.world_size > MAX_RANKS:
        yield paragraph_html(
            f"Timeline, traffic and memory are left out: they need the steps of every rank, and are drawn for"
            f" {MAX_RANKS} ranks or fewer. The figures of the busiest ranks are in the table below.",
            "note",
        )
        return
    yield _figure(
        timeline_picture(plan, title="When every rank computes and receives"),
        "Simulated, message by message, with every wait of one rank for another, as the predicted times above are.",
    )
    yield _figure(
        traffic_picture(plan, title="Who sends how much to whom"),
        "Columns add up to what each rank receives. In backward, K and V are fetched again unless they were kept, and"
        " their gradients, which are float32 sums, go home.",
    )
    yield _figure(
        memory_picture(plan, title="Memory over time"),
        "Memory that the plan itself needs on a rank: pieces that arrived or are on their way, sums, and copies. What"
        " kernels allocate inside comes on top; see the table above.",
    )


def _numbers(plan: Plan) -> Iterator[str]:
    size = plan.layout.world_size
    both = runs(plan) if size <= MAX_RANKS else ()
    ranks = range(size)
    if size > _ROWS:
        shown, which = {*busiest(plan.scheme)}, "the busiest"
        if both:
            which = "those with most pairs, most remote rows, most bytes, the highest peak, the last to finish"
            columns: list[Sequence[float]] = [
                *(run.timeline.finished for run in both),
                _received_bytes(plan),
                _peaks(plan),
            ]
            shown |= {values.index(max(values)) for values in columns}
        ranks = sorted(shown)
        yield paragraph_html(f"Of {size} ranks, {which}, the first and the last.")
    work = plan.scheme.work.astype(float)
    share = work / (work.sum() or 1.0)
    rows: list[list[str]] = []
    for rank in ranks:
        received = [bytes_text(plan.bytes_received(rank, direction)) for direction in ("forward", "backward")]
        row = [str(rank), count_text(int(plan.layout.num_tokens[rank])), f"{100 * share[rank]:.2f}%", *received]
        finished = (seconds_text(run.timeline.finished[rank]) for run in both)
        rows.append([*row, bytes_text(plan.peak_bytes(rank)), *finished])
    heads = ["rank", "tokens", "pairs", "received forward", "received backward", "peak"]
    yield table_html([*heads, *(f"{run.direction} done" for run in both)], rows)
    if both:
        totals = [sum(run.timeline.bytes_received) for run in both]
        yield paragraph_html(
            f"All ranks together receive {bytes_text(totals[0])} in forward and {bytes_text(totals[1])} in backward"
            f" ({count_text(totals[0])} and {count_text(totals[1])} bytes).",
            "muted",
        )


def _machine(machine: Machine, is_assumed: bool) -> Iterator[str]:
    if is_assumed:
        yield paragraph_html("No machine was named, so this one was assumed.", "note")
    links = [
        f"{rate_text(link.bandwidth, 'B/s')} and {seconds_text(link.latency)} latency"
        + (f" inside a node of {link.ranks}" if link.ranks < 1 << 20 else " to all other ranks")
        for link in machine.links
    ]
    host = "does the work itself"
    if machine.launch_seconds:
        times = [seconds_text(t) for t in (machine.launch_seconds, machine.message_seconds, machine.call_seconds)]
        host = f"queues, ahead of the device: {times[0]} per operation, {times[1]} per message, {times[2]} per call"
    shares = f"{machine.forward_share:.3g} of it forward, {machine.backward_share:.3g} backward"
    copies = f"{rate_text(machine.copy_bandwidth, 'B/s')}; {seconds_text(machine.op_seconds)} per operation"
    yield facts_html(
        (
            ("name", machine.name),
            ("source of figures", machine.source),
            ("arithmetic", f"{machine.flops / 1e12:.3g} TFLOP/s a rank, {shares}"),
            ("kernel", about_kernel(machine.kernel)),
            ("copies", copies),
            ("host", host),
            ("links", "; ".join(links)),
        )
    )
