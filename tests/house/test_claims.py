"""No file speaks of what does not exist: a home of the project, releases, badges, people, services."""

import re
import subprocess

import pytest

from tests.house.test_docs import ROOT

SUFFIXES = {".md", ".py", ".toml", ".yml", ".yaml", ".cff", ".ipynb", ".txt", ".html", ".css", ".sh", ""}
OWN = {"tests/house/test_claims.py"}
CLAIMS = {
    "an address of the project": r"(?:github|githubusercontent|gitlab|pypi|anaconda|discord)\.\w+/(?:project/)?longspan"
    r"|longspan\.(?:readthedocs|github|org|io|dev|ai)\b|@longspan/",
    "a picture from elsewhere": r"!\[[^\]]*\]\(\s*<?https?:|<img[^>]+src=\W?https?:",
    "a badge": r"img\.shields\.io|badge\.svg|badges?\.\w+\.\w+/",
    "a package on an index": r"(?:pip|uv|conda) (?:install|add|download) [^\n`]*?(?<![\w./-])longspan\b",
    "a service that has not run": r"\bCI (?:saves|runs|ran|has run|walks|checks)\b|trusted publishing|published by `",
    "people that are not there": r"\bour team\b|\bMAINTAINERS\b|\bCODEOWNERS\b|private reporting",
    "a release": r"\b[Ee]arlier releases\b|(?<!first )\brelease of Longspan\b|\bDOI\b",
    "a mean for the busiest rank": r"10 to 450 times",
    "more than is true": r"masked pairs are never computed|any mask, any score function|figure that Longspan claims",
    "time on GPUs that no one has seen": r"(?:ten|fifteen|five) minutes\W[^.]{0,40}\bGPUs",
}  # fmt: skip


def claims(text):
    """(kind, line) of what a text should not say.

    >>> claims("see https://example.org")
    []
    """
    return [
        (kind, found[0])
        for kind, pattern in CLAIMS.items()
        for found in re.finditer(rf"^.*(?:{pattern}).*$", text, re.MULTILINE)
    ]


def files():
    listed = subprocess.run(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True)
    names = listed.stdout.splitlines() or [path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*")]
    return [ROOT / name for name in names if name not in OWN]


def test_no_file_speaks_of_what_does_not_exist():
    found = []
    for path in files():
        if path.is_file() and path.suffix in SUFFIXES:
            for kind, line in claims(path.read_text()):
                if path.suffix != ".py" or kind != "a picture from elsewhere":  # programs may name one
                    found.append(f"{path.relative_to(ROOT)}: {kind}: {line:.120}")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("an address of the project", "[a](https://github.com/longspan/longspan/blob/main/docs/start.md)"),
        ("an address of the project", 'Documentation = "https://longspan.readthedocs.io"'),
        ("an address of the project", "url: https://pypi.org/project/longspan/"),
        ("an address of the project", "*    @longspan/maintainers"),
        ("a picture from elsewhere", "![a](https://example.org/a.png)"),
        ("a picture from elsewhere", '<img width="4" src="https://example.org/a.png">'),
        ("a badge", "https://img.shields.io/badge/python-blue"),
        ("a package on an index", 'pip install "longspan[trl]"'),
        ("a package on an index", "pip install longspan torchtitan==0.3.0"),
        ("a service that has not run", "CI saves all of them"),
        ("people that are not there", "[private reporting](x)"),
        ("a release", "Earlier releases stay available"),
        ("a mean for the busiest rank", "10 to 450 times fewer"),
        ("more than is true", "for any mask, any score function"),
        ("time on GPUs that no one has seen", "about fifteen minutes on eight GPUs"),
    ],
)
def test_each_kind_is_found(kind, text):
    assert [found for found, _ in claims(text)] == [kind]


@pytest.mark.parametrize(
    "text",
    [
        'pip install ".[trl]"', "pip install -e . --group test", "https://github.com/pytorch/pytorch/issues/1",
        "![a](images/mask.svg)", "python -m longspan verify", "before the first release of Longspan",
    ],
)  # fmt: skip
def test_what_is_true_may_be_said(text):
    assert claims(text) == []
