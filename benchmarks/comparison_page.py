"""Generate docs/comparison.md from benchmarks/comparison.toml.

python -m benchmarks.comparison_page > docs/comparison.md
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

FACTS = Path(__file__).with_name("comparison.toml")
MARKS = {
    "Y": "yes",
    "~": "partly",
    "N": "no",
    "!": "accepted, and silently wrong",
    "?": "unknown",
    "-": "does not apply",
}
RUNS = "results-of-the-runs"
"""The section of the page with results of `benchmarks.comparison`."""


def facts() -> dict[str, Any]:
    return tomllib.loads(FACTS.read_text())


def recorded() -> dict[str, tuple[str, str]]:
    """Return the recorded result of each probe: kind and text."""
    return {name: (kind, text) for name, (kind, text) in facts()["runs"]["answers"].items()}


def address(source: str, repositories: dict[str, str]) -> str:
    """Return the address of a source.

    >>> address("te#12", {"te": "NVIDIA/TransformerEngine"})
    'https://github.com/NVIDIA/TransformerEngine/issues/12'
    >>> address("wheel:fla-core/0.6.0", {}), address("page:rival.md", {}), address("run:fla-cpu", {})
    ('https://pypi.org/project/fla-core/0.6.0/', 'rival.md', '#results-of-the-runs')
    """
    kind, _, rest = source.partition(":")
    if source.startswith("https://"):
        return source
    if kind == "wheel":
        return f"https://pypi.org/project/{rest}/"
    if kind == "page":
        return rest
    if kind == "run":
        return f"#{RUNS}"
    if command(source):
        return "#commands"
    name, _, number = source.partition("#")
    return f"https://github.com/{repositories[name]}/issues/{int(number)}"


def command(source: str) -> bool:
    """Return whether a source is a command in this repository."""
    return source.startswith(("python -m ", "pytest "))


def named(source: str, repositories: dict[str, str]) -> str:
    """Return a source as a link with a short name."""
    where = address(source, repositories)
    if command(source):
        return f"`{source}`"
    kind, _, rest = source.partition(":")
    if source.startswith("https://"):
        name = "/".join(part for part in where.split("/")[2:5] if part)
        return f"[{name}]({where})"
    runner = f"`python -m benchmarks.comparison --only {rest}`"
    names = {"wheel": rest.replace("/", " "), "page": rest.removesuffix(".md"), "run": runner}
    return f"[{names.get(kind, source)}]({where})"


def how(sources: list[str]) -> str:
    """Return whether what a cell states was run here, read, or both.

    >>> how(["run:fla-cpu"]), how(["wheel:torch/2.15.0"]), how(["pytest tests/unit", "te#12"]), how(["page:rival.md"])
    ('run', 'read', 'run and read', 'read')
    """
    is_run = [source.startswith("run:") or command(source) for source in sources]
    is_read = [not ran and not source.startswith("page:") for ran, source in zip(is_run, sources, strict=True)]
    return "run and read" if any(is_run) and any(is_read) else "run" if any(is_run) else "read"


def linked(cell: list[str], repositories: dict[str, str]) -> str:
    """Return a table cell: the mark, bold if it was run, linked to its first source that is not a command.

    The title is the note. It begins with the mark as a word, by which docs/_static/site.css colours the cell.
    """
    mark, words, *sources = cell
    first = next((source for source in sources if not command(source)), sources[0])
    kind = how(sources)
    title = f"{MARKS[mark]} ({kind})" + (f": {words}" if words else "")
    shown = f"**{mark}**" if kind.startswith("run") else mark
    return f'[{shown}]({address(first, repositories)} "{title.replace("`", "").replace(chr(34), chr(39))}")'


def table(rows: list[str], columns: list[str], data: dict[str, Any], names: dict[str, str]) -> str:
    lines = [f"| | {' | '.join(names[column] for column in columns)} |", "|---" * (1 + len(columns)) + "|"]
    for row in rows:
        system = data["systems"][row]
        cells = (linked(system[column], data["repositories"]) for column in columns)
        lines.append(f"| [{system['name']}](#{anchor(system['name'])}) | {' | '.join(cells)} |")
    return "\n".join(lines)


def short_table() -> str:
    """Return the first table with bare marks, for a page that links to the full one."""
    data = facts()
    columns, names = data["short"]["columns"], data["short"]["names"]
    lines = [f"| | {' | '.join(names[column] for column in columns)} |", "|---" * (1 + len(columns)) + "|"]
    for row in data["short"]["rows"]:
        system = data["systems"][row]
        lines.append(f"| {system['name']} | {' | '.join(system[column][0] for column in columns)} |")
    return "\n".join(lines)


def anchor(heading: str) -> str:
    """Return the anchor of a heading as Sphinx and GitHub generate it.

    >>> anchor("PyTorch, SDPA"), anchor("USP (yunchang 0.6.4)")
    ('pytorch-sdpa', 'usp-yunchang-064')
    """
    return re.sub(r"[^a-z0-9 _-]", "", heading.lower()).replace(" ", "-")


def notes(system: dict[str, Any], data: dict[str, Any]) -> str:
    """Return the section with the notes of a system, without cells that the tables show completely."""
    lines = [f"### {system['name']}\n\nSources: {system['read']}.\n"]
    for column, title in data["columns"].items():
        mark, words, *sources = system[column]
        if not words and len(sources) == 1:
            continue
        note = f"**{title}: {MARKS[mark]}** ({how(sources)})" + (f"; {words}" if words else "")
        lines.append(f"- {with_sources(note, sources, data)}")
    return "\n".join(lines)


def with_sources(words: str, sources: list[str], data: dict[str, Any]) -> str:
    return f"{words} ({', '.join(named(source, data['repositories']) for source in sources)})"


def theirs(data: dict[str, Any]) -> str:
    """Return the table of features that only other systems have."""
    lines = ["| feature | available in | Longspan |", "|---|---|---|"]
    for row in data["theirs"]:
        cells = (with_sources(words, sources, data) for words, *sources in (row["who"], row["longspan"]))
        lines.append(f"| {row['what']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def releases(data: dict[str, Any]) -> str:
    """Return the table of what changed between two releases of PyTorch."""
    lines = ["| PyTorch's context parallelism | 2.13.0 | 2.15.0 (read) |", "|---|---|---|"]
    for row in data["releases"]:
        words, *sources = row["before"]
        before = with_sources(f"{words} ({how(sources)})", sources, data)
        lines.append(f"| {row['what']} | {before} | {row['after']} |")
    return "\n".join(lines)


def runs(data: dict[str, Any]) -> str:
    """Return the table of probe results."""
    from benchmarks.comparison_probes import PROBES

    lines = ["| probe | system | request | result |", "|---|---|---|---|"]
    for name, (kind, text) in recorded().items():
        shown = f"`` {text} ``" if kind == "refused" else text
        result = f"**{kind}**, {text}" if kind == "wrong" else f"{kind}: {shown}"
        lines.append(f"| `{name}` | {PROBES[name].system} | {PROBES[name].asks} | {result} |")
    return f"{data['runs']['versions']}\n\n" + "\n".join(lines)


def page() -> str:
    data = facts()
    short, systems = data["short"], data["systems"]
    parts = [
        data["text"]["top"].strip(),
        "## Summary",
        data["text"]["marks"].strip(),
        table(short["rows"], short["columns"], data, short["names"]),
    ]
    for one in data["tables"]:
        parts += [f"## {one['title']}", table(list(systems), one["columns"], data, data["columns"])]
    parts += ["## PyTorch 2.15", data["text"]["releases"].strip(), releases(data)]
    parts += ["## Not implemented in Longspan", theirs(data)]
    parts += ["## Results of the runs", data["text"]["runs"].strip(), runs(data)]
    parts += ["## Details by system", *(notes(system, data) for system in systems.values())]
    parts += ["## Commands", data["text"]["commands"].strip()]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.stdout.write(short_table() + "\n" if "--readme" in sys.argv else page())
