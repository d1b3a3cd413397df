"""Self-contained HTML: everything that is not markup of ours is escaped, nothing is fetched, nothing is run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from longspan.viz.drawing.scene import FONT, Scene, escaped

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
