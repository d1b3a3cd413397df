"""The documentation: it builds without a warning, its links lead somewhere, and what it quotes and prints is so.

Blocks marked `python` run here in this process, those marked `python torchrun` by torchrun (`python -m tests.jobs`).
`python file=NAME` is saved and run by the page's own commands (test_walks.py).
`python fragment` is for what needs files or models of the reader's own; it must at least be Python. Lines that `text`
blocks show under a `$ longspan` command are lines that this command prints.
"""

import importlib
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from longspan.cli import main
from tests.house.test_docs import ROOT
from tests.jobs.table import chosen

DOCS = ROOT / "docs"
FENCE = re.compile(r"^```(\w+) ?([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# Blocks of these pages run in tests of their own, which say more about what comes out.
RUN_ELSEWHERE = {"training.md": "gloo/test_curves.py", "verify.md": "gloo/test_verify.py"}
WALKED = {"tutorial.md"}  # test_walks.py saves their files and types their commands
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


def blocks(page, language="python"):
    """(kind, code) of a page's fences; code begins on its line of the page, so that errors name the right one."""
    text = (DOCS / page).read_text()
    found = [
        (m[2], "\n" * text[: m.start()].count("\n") + "\n" + m[3]) for m in FENCE.finditer(text) if m[1] == language
    ]
    kinds = {kind.partition("=")[0] for kind, _ in found}
    assert language != "python" or kinds <= {"", "torchrun", "fragment", "file"}, page
    assert "file" not in kinds or page in WALKED, page
    return found


def coded(kind):
    """(page and line, code) of every block of a kind that runs here."""
    return [
        pytest.param(page, code, id=f"{page}:{len(code) - len(code.lstrip()) + 1}")
        for page in PAGES
        if page not in RUN_ELSEWHERE
        for found, code in blocks(page)
        if found == kind
    ]


def commands():
    """(words, lines shown) of every `$ longspan plan` and `$ longspan show` in the pages."""
    found = []
    for page in PAGES:
        for _, text in blocks(page, "text"):
            joined = re.sub(r"\\\n\s*", "", text)  # a command may go on behind a backslash
            for part in re.split(r"^\$ ", joined, flags=re.MULTILINE)[1:]:
                command, *lines = part.splitlines()
                if re.match(r"longspan (plan|show) [^|]+$", command) and "machine.json" not in command:
                    shown = [line for line in lines if line]
                    found.append(pytest.param(shlex.split(command)[1:], shown, id=f"{page}:{command}"))
    return found


@pytest.mark.parametrize(("page", "code"), coded(""))
def test_python_blocks_run(page, code):
    if "transformers" in code or "huggingface" in code:
        pytest.importorskip("transformers")
    exec(compile(code, f"docs/{page}", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize(("page", "code"), coded("fragment"))
def test_fragments_are_python(page, code):
    compile(code, f"docs/{page}", "exec")


def test_pages_that_run_elsewhere_do():
    for page, test in RUN_ELSEWHERE.items():
        assert page in (ROOT / "tests" / test).read_text()


def test_torchrun_blocks_are_among_the_jobs():
    """`.ci/run` runs them by literal torchrun: `python -m tests.jobs`."""
    jobs = {job.code.strip() for job in chosen(40) if job.kind == "page"}
    found = [code.strip() for page in PAGES for kind, code in blocks(page) if kind == "torchrun"]
    assert len(found) >= 8
    assert set(found) <= jobs


@pytest.mark.parametrize(("words", "lines"), commands())
def test_quoted_commands_print_what_is_quoted(capsys, monkeypatch, words, lines):
    monkeypatch.setenv("COLUMNS", "100")
    does_not_fit = any("GB: no, because" in line for line in lines)
    assert main(words) == int(does_not_fit)
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    missing = [line for line in lines if line.rstrip() not in printed]
    assert not missing, "\n".join(["not printed:", *missing, "printed:", *printed])


def test_docs_build_without_warnings(tmp_path):
    """Links between pages, names in the API reference and the table of contents are all checked by this."""
    for name in ("sphinx", "furo", "myst_parser", "transformers"):
        pytest.importorskip(name)
    options = ["-W", "-n", "--keep-going", "-q", "-b", "html", "-d", tmp_path / "trees"]
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, DOCS, tmp_path / "html"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    for page in PAGES:
        assert (tmp_path / "html" / page).with_suffix(".html").exists()
    _check_search(tmp_path / "html")
    _check_reference(tmp_path / "html" / "reference")
    _check_links_of_html(tmp_path / "html")


def _check_search(folder):
    """What people look for is in the index that the search page reads, under its page."""
    index = json.loads((folder / "searchindex.js").read_text().removeprefix("Search.setIndex(").removesuffix(")"))
    for word, page in (("ulyss", "glossary"), ("trl", "huggingface_training"), ("sigstop", "dead_ranks")):
        places = [index[kind].get(word, []) for kind in ("terms", "titleterms")]
        found = {number for each in places for number in (each if isinstance(each, list) else [each])}
        assert index["docnames"].index(page) in found, word
    assert 'src="_static/searchtools.js' in (folder / "search.html").read_text()


def _check_reference(folder):
    """Every public name is in the reference, and types of PyTorch lead to its pages."""
    texts = {path.stem: path.read_text() for path in folder.glob("*.html")}
    modules = ("", "masks", "layouts", "planning", "scores", "training", "verification", "testing", "viz")
    for module in modules:
        package = f"longspan.{module}".rstrip(".")
        for name in importlib.import_module(package).__all__:
            wanted = [f'id="{package}.{room}{name}"' for room in ("", "errors.", "verification.")]
            if name not in modules:
                assert any(id_ in text for id_ in wanted for text in texts.values()), f"{package}.{name}"
    for page, name in (("attention", "attention"), ("plan", "plan")):
        assert f'id="longspan.{name}"' in texts[page]
    assert "https://docs.pytorch.org/docs/stable/distributed.html#torch" in texts["training"]
    assert "https://docs.pytorch.org/docs/stable/tensors.html#torch.Tensor" in texts["attention"]


def _check_links_of_html(folder):
    """Every relative link and picture of the built pages exists, anchors too."""
    texts = {path: path.read_text() for path in folder.rglob("*.html")}
    anchors = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in texts.items()}
    for path, text in texts.items():
        for link in re.findall(r'(?:href|src)="([^"]+)"', text):
            target, _, anchor = link.partition("#")
            if re.match(r"[a-z]+:", link):
                assert link.startswith(("https://", "data:")), f"{path.name}: {link}"
                continue
            file = (path.parent / target.partition("?")[0]).resolve() if target else path
            assert file.exists(), f"{path.name}: {link} leads nowhere"
            if anchor and file in anchors and path.name not in ("genindex.html", "search.html"):
                assert anchor in anchors[file], f"{path.name}: {link} has no such anchor"


@pytest.mark.parametrize("name", sorted(path.name for path in ROOT.glob("*.md")))
def test_links_of_documents_at_the_top(name):
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", (ROOT / name).read_text()):
        assert target.startswith("https://") or (ROOT / target).exists(), f"{name}: {target} leads nowhere"


def test_every_page_shows_pictures_that_exist():
    for page in PAGES:
        for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", (DOCS / page).read_text()):
            assert ((DOCS / page).parent / target).exists(), f"{page}: {target}"
    for layer in ("masks", "layouts", "planning", "run"):
        assert re.search(r"!\[.+\]\(\.\./images/\w+\.png\)", (DOCS / "layers" / f"{layer}.md").read_text())


def test_no_paths_of_a_machine_in_the_pages():
    for page in PAGES:
        assert not re.search(r"/(tmp|work|home|root)/\w", (DOCS / page).read_text()), page


def test_block_lines_are_those_of_the_page():
    page = "start.md"
    (first, *_) = [code for kind, code in blocks(page) if not kind]
    line = len(first) - len(first.lstrip())
    assert Path(DOCS / page).read_text().splitlines()[line] == first.lstrip().splitlines()[0]


COLUMNS = 88


def too_wide(text):
    """Lines of code that do not fit: of what people copy, and of commands that output is shown for."""
    copied = {"python", "bash", "pycon", "diff"}
    lines = [(block[1], line) for block in FENCE.finditer(text) for line in block[3].splitlines()]
    return [line for kind, line in lines if len(line) > COLUMNS and (kind in copied or line.startswith("$ "))]


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{page}" for page in PAGES)])
def test_code_fits_without_scrolling(page):
    output = ("schedule ",)  # of a pycon block: printed, not typed
    wide = [line for line in too_wide((ROOT / page).read_text()) if not line.startswith(output)]
    assert not wide, "\n".join(wide)


def test_wide_code_is_found():
    long = "x = " + "1 + " * 30 + "1"
    assert too_wide(f"```python\n{long}\n```\n") == [long]
    assert too_wide(f"```text\n$ {long}\n{long}\n```\n") == [f"$ {long}"]
    assert too_wide("```python\nx = 1\n```\n") == []
