"""docs/comparison.md from benchmarks/beside.toml: every cell with its source.

python -m benchmarks.beside_page > docs/comparison.md
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

FACTS = Path(__file__).with_name("beside.toml")
MARKS = {
    "Y": "yes",
    "~": "partly",
    "N": "no, or refused",
    "!": "accepted, and silently wrong",
    "?": "not found out",
    "-": "does not apply",
}
RUNS = "what-the-runs-said"
"""The section of the page that has answers of `benchmarks.beside`."""


def facts() -> dict[str, Any]:
    return tomllib.loads(FACTS.read_text())


def recorded() -> dict[str, tuple[str, str]]:
    """What the page says that each probe answered: kind and text."""
    return {name: (kind, text) for name, (kind, text) in facts()["runs"]["answers"].items()}


def address(source: str, repositories: dict[str, str]) -> str:
    """Where a source is.

    >>> address("te#12", {"te": "NVIDIA/TransformerEngine"})
    'https://github.com/NVIDIA/TransformerEngine/issues/12'
    >>> address("wheel:fla-core/0.6.0", {}), address("page:rival.md", {}), address("run:fla-cpu", {})
    ('https://pypi.org/project/fla-core/0.6.0/', 'rival.md', '#what-the-runs-said')
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
    """Whether a source is a command in this repository."""
    return source.startswith(("python -m ", "pytest "))


def named(source: str, repositories: dict[str, str]) -> str:
    """A source as a link with a short name."""
    where = address(source, repositories)
    if command(source):
        return f"`{source}`"
    kind, _, rest = source.partition(":")
    if source.startswith("https://"):
        name = "/".join(part for part in where.split("/")[2:5] if part)
        return f"[{name}]({where})"
    names = {"wheel": rest.replace("/", " "), "page": rest.removesuffix(".md"), "run": f"run {rest}"}
    return f"[{names.get(kind, source)}]({where})"


def linked(cell: list[str], repositories: dict[str, str]) -> str:
    """A cell of a table: the mark, leading to its first source that is not a command, with the words as a title."""
    mark, words, *sources = cell
    first = next((source for source in sources if not command(source)), sources[0])
    title = words.replace("`", "").replace('"', "'")
    return f"[{mark}]({address(first, repositories)}" + (f' "{title}")' if title else ")")


def table(rows: list[str], columns: list[str], data: dict[str, Any], names: dict[str, str]) -> str:
    lines = [f"| | {' | '.join(names[column] for column in columns)} |", "|---" * (1 + len(columns)) + "|"]
    for row in rows:
        system = data["systems"][row]
        cells = (linked(system[column], data["repositories"]) for column in columns)
        lines.append(f"| [{system['name']}](#{anchor(system['name'])}) | {' | '.join(cells)} |")
    return "\n".join(lines)


def short_table() -> str:
    """The first table with bare marks, for a page that links to the whole."""
    data = facts()
    columns, names = data["short"]["columns"], data["short"]["names"]
    lines = [f"| | {' | '.join(names[column] for column in columns)} |", "|---" * (1 + len(columns)) + "|"]
    for row in data["short"]["rows"]:
        system = data["systems"][row]
        lines.append(f"| {system['name']} | {' | '.join(system[column][0] for column in columns)} |")
    return "\n".join(lines)


def anchor(heading: str) -> str:
    """As Sphinx and GitHub make it.

    >>> anchor("PyTorch 2.13, SDPA"), anchor("USP (yunchang 0.6.4)")
    ('pytorch-213-sdpa', 'usp-yunchang-064')
    """
    return re.sub(r"[^a-z0-9 _-]", "", heading.lower()).replace(" ", "-")


def notes(system: dict[str, Any], data: dict[str, Any]) -> str:
    """A system's cells in words."""
    lines = [f"### {system['name']}\n\nRead: {system['read']}.\n"]
    for column, title in data["columns"].items():
        mark, words, *sources = system[column]
        said = f"**{title}: {MARKS[mark]}**" + (f"; {words}" if words else "")
        lines.append(f"- {with_sources(said, sources, data)}")
    return "\n".join(lines)


def with_sources(words: str, sources: list[str], data: dict[str, Any]) -> str:
    return f"{words} ({', '.join(named(source, data['repositories']) for source in sources)})"


def theirs(data: dict[str, Any]) -> str:
    """What others have that Longspan has not."""
    lines = ["| what | who | Longspan |", "|---|---|---|"]
    for row in data["theirs"]:
        cells = (with_sources(words, sources, data) for words, *sources in (row["who"], row["longspan"]))
        lines.append(f"| {row['what']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def runs(data: dict[str, Any]) -> str:
    """What probes answered."""
    from benchmarks.beside_probes import PROBES

    lines = ["| probe | who | asked | answer |", "|---|---|---|---|"]
    for name, (kind, text) in recorded().items():
        said = f"**{kind}**, {text}" if kind == "wrong" else f"{kind}: {f'`` {text} ``' if kind == 'refused' else text}"
        lines.append(f"| `{name}` | {PROBES[name].system} | {PROBES[name].asks} | {said} |")
    return f"{data['runs']['versions']}\n\n" + "\n".join(lines)


def page() -> str:
    data = facts()
    short, systems = data["short"], data["systems"]
    parts = [
        data["text"]["top"].strip(),
        "## In short",
        data["text"]["marks"].strip(),
        table(short["rows"], short["columns"], data, short["names"]),
    ]
    for one in data["tables"]:
        parts += [f"## {one['title']}", table(list(systems), one["columns"], data, data["columns"])]
    parts += ["## What they have and Longspan has not", theirs(data)]
    parts += ["## What the runs said", data["text"]["runs"].strip(), runs(data)]
    parts += ["## Every cell in words", *(notes(system, data) for system in systems.values())]
    parts += ["## Commands", data["text"]["commands"].strip()]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    sys.stdout.write(short_table() + "\n" if "--readme" in sys.argv else page())
