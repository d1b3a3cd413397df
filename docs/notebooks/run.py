"""Run every notebook of this folder and store its output.

python docs/notebooks/run.py
"""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent


def ran(path: Path, folder: str | Path) -> nbformat.NotebookNode:
    """Return the notebook with new outputs, run in its own folder. Raises if a cell does."""
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook,
        timeout=600,
        startup_timeout=600,
        kernel_name="python3",
        record_timing=False,
    )
    return client.execute(cwd=str(folder))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for path in sorted(HERE.glob("*.ipynb")):
        with TemporaryDirectory() as folder:
            notebook = ran(path, folder)
        notebook.metadata.pop("language_info", None)
        path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
        print(
            f"{path.name}: {len(notebook.cells)} cells, {path.stat().st_size:,} bytes"
        )
