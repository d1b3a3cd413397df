"""HTML: what notebooks show, and a page around pictures. Nothing in it is fetched or run; all text is escaped."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from longspan.errors import LongspanError
from longspan.formatting import bytes_text, count_text, seconds_text
from longspan.layouts import Layout
from longspan.masks import Mask
from longspan.planning.plan import Plan
from longspan.planning.scan_plan import ScanPlan
from longspan.viz.pictures import layout_picture, mask_name, mask_picture

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LENGTH = 1024
"""Number of tokens for which a mask without a length of its own is drawn."""
STYLE = (
    "body{margin:2rem auto;max-width:60rem;padding:0 1rem;font:16px/1.5 system-ui,sans-serif}img{max-width:100%}"
    "pre{background:#f6f7f9;padding:1rem;white-space:pre-wrap}"
)


def picture_html(figure: Figure, dpi: int = 100) -> str:
    """Return the figure as an image inside the page."""
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=dpi)
    return f'<img alt="" src="data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}">'


def page_html(title: str, figures: Sequence[Figure], text: str = "") -> str:
    """Return a whole page with these figures, and text below them."""
    name = html.escape(title)
    body = "\n".join([f"<h1>{name}</h1>", *(f"<p>{picture_html(figure, 150)}</p>" for figure in figures)])
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{name}</title><style>{STYLE}</style>'
        f"</head>\n<body>\n{body}\n<pre>{html.escape(text)}</pre>\n</body></html>\n"
    )


def notebook_html(value: Mask | Layout | Plan | ScanPlan) -> str:
    """Return what a notebook shows: a picture, and for plans a table of the schemes that were compared.

    The function of a mask is never called. Without matplotlib, the `repr` is shown.
    """
    if isinstance(value, ScanPlan):
        return f"<pre>{html.escape(value.explain())}</pre>"
    try:
        if isinstance(value, Plan):
            title = f"Plan {value.fingerprint[:12]}: {value.scheme.name} of {mask_name(value.mask)}"
            figure = mask_picture(value.mask, value.layout, title=title, ask=False)
        elif isinstance(value, Layout):
            figure = layout_picture(value)
        else:
            title = repr(value) if value.seq_len else f"{value!r}, drawn for {count_text(LENGTH)} tokens"
            figure = mask_picture(value, seq_len=value.seq_len or LENGTH, title=title, ask=False)
    except LongspanError as error:
        return f"<pre>{html.escape(repr(value))}</pre><p>{html.escape(str(error))}</p>"
    return picture_html(figure) + (_schemes_html(value) if isinstance(value, Plan) else "")


def _schemes_html(plan: Plan) -> str:
    heads = ("", "scheme", "forward", "backward", "received", "peak")
    rows: list[tuple[str, ...]] = []
    for reason in plan.reasons:
        mark = "*" if reason.chosen else ""
        if reason.at_least:
            rows.append((mark, reason.scheme, f"at least {seconds_text(reason.seconds)}", "", "", ""))
            continue
        times = seconds_text(reason.forward_seconds), seconds_text(reason.backward_seconds)
        rows.append((mark, reason.scheme, *times, bytes_text(reason.bytes_received), bytes_text(reason.peak_bytes)))
    cells = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in (heads, *rows))
    note = (
        f"Times are simulated on {plan.machine.name}, for {plan.kernel_assumed}. Bytes are the most of any rank; memory"
        " is of ranks likely to be busiest."
    )
    return f"<table>{cells}</table><p>{html.escape(note)}</p>"
