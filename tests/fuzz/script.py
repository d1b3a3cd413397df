"""A file that repeats a case by itself: the oracle, the call and the comparison are in it."""

import re
from pathlib import Path

from .cases import Case

PARTS = ("cases", "oracle", "calls", "expected", "work")
RELATIVE = re.compile(r"^from \.\w+ import (\([^)]*\)|[^\n]*)\n", re.MULTILINE)


def script(case: Case, said: str = "") -> str:
    """The text of the file. It ends with status 0 if all is right (or refused), and 1 if not."""
    how = f"torchrun --nproc-per-node {case.world} repeat.py" if case.world > 1 else "python repeat.py"
    found = "".join(f"# {line}\n" for line in said.splitlines()[-12:])
    parts = [f"# Run it with: {how}\n{found}"]
    for name in PARTS:
        text = (Path(__file__).parent / f"{name}.py").read_text()
        parts.append(RELATIVE.sub("", text))
    parts.append(f"\nimport sys\n\nCASE = {case!r}\n\nif __name__ == '__main__':\n    sys.exit(repeat(CASE))\n")
    return "\n".join(parts)
