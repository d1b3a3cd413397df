"""The notebooks of the documentation run from their first cell to their last, and print what is stored in them."""

import importlib.util
import os

import pytest

from tests.house.test_docs import ROOT
from tests.jobs.walk import alike

FOLDER = ROOT / "docs" / "notebooks"
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb"))


@pytest.fixture(scope="module")
def nbformat():
    for name in ("nbclient", "ipykernel", "IPython"):
        pytest.importorskip(name)
    return pytest.importorskip("nbformat")


def printed(notebook):
    """Every line that cells printed. Pictures are compared by kind alone: text inside them may be laid out anew."""
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            yield from output["text"].splitlines() if "text" in output else [" ".join(sorted(output["data"]))]


def run(path, folder, monkeypatch):
    spec = importlib.util.spec_from_file_location("run_notebooks", FOLDER / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return module.ran(path, folder)


@pytest.mark.share(2)
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore")  # of Jupyter's own
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks_run_and_print_what_is_stored(nbformat, tmp_path, monkeypatch, name):
    stored = list(printed(nbformat.read(FOLDER / name, as_version=4)))
    found = list(printed(run(FOLDER / name, tmp_path, monkeypatch)))
    assert len(stored) >= 5
    assert len(found) == len(stored)
    assert not [pair for pair in zip(stored, found, strict=True) if not alike(*pair)]


@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore")
def test_a_notebook_that_fails_is_seen(nbformat, tmp_path, monkeypatch):
    path = tmp_path / "bad.ipynb"
    cells = [nbformat.v4.new_code_cell("print(1)\nassert 1 == 2")]
    path.write_text(nbformat.writes(nbformat.v4.new_notebook(cells=cells)))
    with pytest.raises(Exception, match="AssertionError"):
        run(path, tmp_path, monkeypatch)


def test_notebooks_are_small(nbformat):
    assert len(NOTEBOOKS) == 3
    for name in NOTEBOOKS:
        assert (FOLDER / name).stat().st_size < 300_000
        text = (FOLDER / name).read_text()
        assert "Traceback" not in text
