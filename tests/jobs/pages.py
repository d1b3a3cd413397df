"""What the pages and the examples tell people to run."""

import re
import shlex

from .runner import ROOT

BLOCK = re.compile(r"^```python torchrun\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(
    r"^(?:\$ )?torchrun --nproc-per-node ((?:[^\n]*\\\n)*[^\n]*)$|`torchrun --nproc-per-node ([^`]+)`", re.M
)
PAGES = ("README.md", *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")))
# As the page says, or what its sizes allow; else 2 to 4.
RANKS = {"docs/training.md": (2, 4)}
# A line that shows the answer to be right, as a pattern. Pages that print nothing must still end with status 0.
SMALL = r"(0\.0e\+00|\d\.\de-(0[5-9]|[1-9]\d))"
LINES = {
    "docs/functions.md": f"is off by {SMALL}",
    "docs/huggingface.md": f"error {SMALL}",
    "docs/huggingface_training.md": f"steps, error {SMALL}",
    "docs/hybrids.md": f"off by {SMALL}|logits by 0, with Longspan: True",
    "docs/long_context.md": f"one process by {SMALL}",
    "docs/long_tailed.md": f"micro-batches, error {SMALL}",
    "docs/packed.md": rf"tokens, loss (\d+\.\d{{3}})\d, one device \1|tokens, error {SMALL}",
    "docs/rl.md": f"differ from one process by {SMALL}",
    "docs/start.md": f"differs from one device by {SMALL}",
    "docs/training.md": f"differ from one process by {SMALL}",
    "docs/upstream/pytorch_score_mod.md": r"shifted by hand: error by rank( 0\.0e\+00)+\n",
    "docs/verify.md": r"RIGHT",
}
PROGRAM = f"losses differ from one process by {SMALL}, gradient norms by {SMALL}"
EXAMPLES = {
    "block_diffusion": f"one process {SMALL}",
    "draft_model": f"one process {SMALL}",
    "fsdp2": r"step 19 loss \d",
    "grpo_fsdp2": PROGRAM,
    "hf_trainer": f"one process {SMALL}",
    "hybrid": f"one process {SMALL}",
    "learned_bias": f"one process {SMALL}",
    "long_tailed": f"one process {SMALL}",
    "migration": f"one process {SMALL}",
    "qwen3_256k": PROGRAM,
    "qwen3_256k_trl": PROGRAM,
    "windows": f"one process {SMALL}",
}
# Of examples that need any, so that they run here.
ARGUMENTS = dict.fromkeys(("grpo_fsdp2", "qwen3_256k", "qwen3_256k_trl"), ("--smoke",))
# torchtitan's needs a registered config of a GPU run; `tests/gpu` takes minutes, and gloo/test_gpu_suite.py runs it;
# benchmarks measure minutes; the others in the pages are files, which are blocks above.
LEFT_OUT = re.compile(r"torchtitan|\.py\b|^\d+$|machine\.json|tests/gpu|benchmarks")


def blocks() -> list[tuple[str, int, str]]:
    """(page, number on it, code) of every block that is meant for torchrun."""
    return [(page, n, code) for page in PAGES for n, code in enumerate(BLOCK.findall((ROOT / page).read_text()))]


def examples() -> list[str]:
    """The names of all files in examples."""
    return sorted(path.stem for path in (ROOT / "examples").glob("*.py"))


def commands() -> list[tuple[str, list[str]]]:
    """(page, words after torchrun) of the commands that pages print, `-m longspan ...`."""
    found = []
    for page in PAGES:
        for match in COMMAND.findall((ROOT / page).read_text()):
            words = (match[0] or match[1]).replace("\\\n", " ")
            if not LEFT_OUT.search(words):
                found.append((page, ["--nproc-per-node", *shlex.split(words, comments=True)]))
    return found
