"""Compare Longspan with axolotl-ringmaster 0.2.7: the same tiny models, weights and batches over 2 and 3 Gloo ranks.

    python -m venv rival && rival/bin/pip install torch==2.13.0 && rival/bin/pip install transformers==5.22.2
    rival/bin/pip install --no-deps axolotl-ringmaster==0.2.7
    PYTHONPATH=src:. rival/bin/python -m benchmarks.rival    # the table of docs/rival.md, two minutes

Each cell has the largest error of logits / of gradients, relative to the largest logit / gradient of "eager" on one
device, or the error message. Without ringmaster its columns are omitted. Exits with 1 if a result of Longspan is wrong;
an error message is accepted.

Ringmaster is called as in its README for plain PyTorch, with the parts that run on CPUs: Ulysses around "sdpa", and the
ring that rotates (its default gathers, with GPU kernels). The loss is computed from logits here, the same for both.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import itertools
import sys
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.ranks import Ranks
from benchmarks.rival_models import CASES, FAMILIES, batch_of, gradients_of, loss_of, model_of, targets_of, truth

LIMIT = 1e-4
"""Rounding in float32 is 1e-6 for most and up to 3e-5 for Qwen3-Next; the smallest mistake here is 1e-2."""
TIMEOUT = 90.0
Run = Callable[[nn.Module, str], tuple[Tensor, Tensor]]
"""Return type of a library's forward pass on this rank: its logits, and the positions of their tokens."""


@dataclass(frozen=True)
class CellResult:
    """Result of one cell: relative errors, or a message. `refused`: the message is the library's own, not from code
    below it."""

    logits: float = float("nan")
    gradients: float = float("nan")
    message: str = ""
    refused: bool = False

    @property
    def right(self) -> bool:
        return not self.message and max(self.logits, self.gradients) <= LIMIT


# -- the two libraries -------------------------------------------------------------------------------------------------


def longspan(model: Any, case: str) -> tuple[Tensor, Tensor]:
    """Run `shard_inputs` and the model, as in docs/huggingface.md."""
    from longspan import huggingface

    model.set_attn_implementation("longspan")
    inputs = huggingface.shard_inputs(model, batch_of(case), dist.group.WORLD)
    places = torch.as_tensor(inputs["longspan"].layout.positions(dist.get_rank()))
    return model(**inputs).logits, places


def transformers(model: Any, case: str) -> tuple[Tensor, Tensor]:
    """Run the unmodified model on one device."""
    return model(**batch_of(case), use_cache=False).logits, torch.arange(targets_of(case).shape[1])


def ulysses(model: Any, case: str) -> tuple[Tensor, Tensor]:
    return _ringmaster(model, case, "ulysses")


def ring(model: Any, case: str) -> tuple[Tensor, Tensor]:
    return _ringmaster(model, case, "ring")


def _ringmaster(model: Any, case: str, backend: str) -> tuple[Tensor, Tensor]:
    import ringmaster as theirs  # pyright: ignore[reportMissingImports]

    rank, world_size = dist.get_rank(), dist.get_world_size()
    config = theirs.RingmasterConfig(
        size=world_size, backend=theirs.Backend(backend), rotate_method=theirs.RotateMethod.ALLTOALL
    )
    heads = model.config.num_key_value_heads
    runtime = theirs.setup(config, num_kv_heads=heads, device_type="cpu", inner_attn="sdpa")
    try:
        model.set_attn_implementation(runtime.attn_implementation)
        theirs.wire_recurrent_layers(model)
        with theirs.ContextParallelContextManager([model], runtime.cp_group):
            logits = model(**batch_of(case), use_cache=False).logits
    finally:
        theirs.teardown()
    return logits, torch.arange(targets_of(case).shape[1]).chunk(world_size)[rank]


LIBRARIES: dict[str, tuple[Run, tuple[int, ...]]] = {
    "transformers": (transformers, (1,)),
    "ringmaster, Ulysses": (ulysses, (2, 3)),
    "ringmaster, ring": (ring, (2, 3)),
    "Longspan": (longspan, (2, 3)),
}
"""Libraries with the numbers of ranks they run on."""


# -- one cell ----------------------------------------------------------------------------------------------------------


def cell(library: str, family: str, case: str) -> CellResult:
    """Return one library's errors for one model and batch, on this rank, or its message."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return measured(LIBRARIES[library][0], family, case)
        except Exception as error:
            return _message_of(error)


def measured(run: Run, family: str, case: str) -> CellResult:
    """Return the errors of a forward and a backward pass."""
    logits, gradients = truth(family, case)
    model = model_of(family)
    own, places = run(model, case)
    loss_of(own, targets_of(case)[:, places], case).backward()
    result = gradients_of(model)
    for gradient in result.values():
        dist.all_reduce(gradient)
    off = max(float((result[name] - right).abs().max()) for name, right in gradients.items())
    largest = max(float(right.abs().max()) for right in gradients.values())
    return CellResult(float((own.detach() - logits[:, places]).abs().max() / logits.abs().max()), off / largest)


def _message_of(error: Exception) -> CellResult:
    """Return the first sentence, and whether it is from one of the two libraries."""
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    words = (str(error).splitlines() or [""])[0]
    words = words if len(words) <= 300 else words[:297] + "..."
    refused = any(f"/{name}/" in last for name in ("ringmaster", "longspan"))
    return CellResult(message=f"{type(error).__name__}: {words}", refused=refused)


def worst(result: list[CellResult]) -> CellResult:
    """Return the worst of all ranks: the first message, or the largest errors."""
    for one in result:
        if one.message:
            return one
    return CellResult(max(one.logits for one in result), max(one.gradients for one in result))


class Pool:
    """Ranks for one library, recreated after a hang."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.ranks: Ranks | None = None

    def run(self, *args: str) -> CellResult:
        self.ranks = self.ranks or Ranks(self.world_size, timeout=TIMEOUT)
        try:
            return worst(self.ranks.run(cell, *args))
        except TimeoutError:
            self.ranks.end()
            self.ranks = None
            return CellResult(message=f"no answer within {TIMEOUT:.0f} s")

    def end(self) -> None:
        if self.ranks is not None:
            self.ranks.__exit__(None, None, None)


# -- the table ---------------------------------------------------------------------------------------------------------


def shown(result: CellResult, notes: list[str]) -> str:
    """Return a cell of the table: errors, bold if wrong, or the number of a note."""
    if not result.message:
        if result.logits == result.gradients == 0.0:
            return "0"
        text = f"{result.logits:.0e} / {result.gradients:.0e}"
        return text if result.right else f"**{result.logits:.2f} / {result.gradients:.2f}**"
    if result.message not in notes:
        notes.append(result.message)
    return f"{'refused' if result.refused else 'fails'} [{notes.index(result.message) + 1}]"


def versions(here: bool) -> str:
    names = ["torch", "transformers", *(["axolotl-ringmaster"] if here else [])]
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in names)


def main() -> int:
    here = importlib.util.find_spec("ringmaster") is not None
    columns = [(name, ranks) for name, (_, counts) in LIBRARIES.items() for ranks in counts]
    if not here:
        print("axolotl-ringmaster is not installed: without its columns.\n")
        columns = [column for column in columns if "ringmaster" not in column[0]]
    pools = {column: Pool(column[1]) for column in columns}
    notes, missed = list[str](), 0
    print(versions(here) + "\n")
    print(f"| model | batch | {' | '.join(f'{library}, {ranks}' for library, ranks in columns)} |")
    print("|---" * (2 + len(columns)) + "|")
    for (family, (what, _, _)), case in itertools.product(FAMILIES.items(), CASES):
        result = {column: pools[column].run(column[0], family, case) for column in columns}
        missed += sum(not (one.right or one.refused) for (library, _), one in result.items() if library == "Longspan")
        print(f"| {family}: {what} | {case} | {' | '.join(shown(one, notes) for one in result.values())} |", flush=True)
    for pool in pools.values():
        pool.end()
    print("".join(f"\n{number}. `{text}`" for number, text in enumerate(notes, 1)))
    print(f"\n{missed} cells of Longspan are wrong" if missed else "\nevery cell of Longspan is right or refused")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
