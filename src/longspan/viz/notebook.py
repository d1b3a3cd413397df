"""What notebooks show for masks, layouts and plans. `longspan/__init__.py` hangs it on the classes, which lie below."""

from __future__ import annotations

from longspan.formatting import bytes_text, count_text, seconds_text
from longspan.layouts import Layout
from longspan.masks import Mask
from longspan.planning.plan import Plan
from longspan.planning.scan_plan import ScanPlan
from longspan.viz.layout import layout_picture
from longspan.viz.mask import mask_name, mask_picture
from longspan.viz.scan import scan_picture
from longspan.viz.scene import Scene, escaped

_LENGTH = 1024
"""Tokens that a mask without a length of its own is drawn for."""


def notebook_html(value: Mask | Layout | Plan | ScanPlan) -> str:
    """A picture, and for plans the schemes that were compared. A mask's function is never called for it."""
    if isinstance(value, Plan):
        title = f"Plan {value.fingerprint[:12]}: {value.scheme.name} of {mask_name(value.mask)}"
        return _framed(mask_picture(value.mask, value.layout, title=title, ask=False)) + _compared(value)
    if isinstance(value, ScanPlan):
        return _framed(scan_picture(value, title=f"Scan {value.fingerprint[:12]}: {value.scheme}"))
    if isinstance(value, Layout):
        return _framed(layout_picture(value))
    if value.seq_len is None:
        title = f"{value!r}, drawn for {count_text(_LENGTH)} tokens"
        return _framed(mask_picture(value, seq_len=_LENGTH, title=title, ask=False))
    return _framed(mask_picture(value, title=repr(value), ask=False))


def _framed(scene: Scene) -> str:
    return f'<div style="max-width:{scene.width:.0f}px;overflow-x:auto">{scene.svg()}</div>'


def _compared(plan: Plan) -> str:
    heads = ("", "scheme", "forward", "backward", "received", "peak", "in kernels")
    lines = ["<tr>" + "".join(f"<th>{head}</th>" for head in heads) + "</tr>"]
    for reason in plan.reasons:
        cells = [
            "✓" if reason.chosen else "",
            reason.scheme,
            seconds_text(reason.forward_seconds),
            seconds_text(reason.backward_seconds),
            bytes_text(reason.bytes_received),
            bytes_text(reason.peak_bytes),
            "unknown" if reason.workspace_bytes is None else bytes_text(reason.workspace_bytes),
        ]
        if reason.at_least:
            cells[2:] = [f"at least {seconds_text(reason.seconds)}", "", "", "", ""]
        lines.append("<tr>" + "".join(f"<td>{escaped(cell)}</td>" for cell in cells) + "</tr>")
    said = (
        f"Times are simulated on {plan.machine.name}, for {plan.kernel_assumed}. Bytes are the most of any rank; times"
        " and memory are of ranks likely to be busiest."
    )
    return f"<table>{''.join(lines)}</table><p>{escaped(said)}</p>"
