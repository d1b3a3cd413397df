"""Run a copy of PyTorch's tests of context parallelism on CPUs, with `longspan.torch_api` in place of PyTorch's module.

    python -m benchmarks.torch_tests PATH [--ranks 2] [--only NAME] [--cell TEXT] [--module torch]

PATH is PyTorch's test/distributed/tensor/test_attention.py, from a checkout of the reader's own. It is imported
unchanged; the names that it imports from PyTorch's context parallelism are Longspan's (`REPLACED`). Its tests need GPUs
for reasons that are lifted here, each in one place:

- skips without GPUs, the flags of fused kernels and the number of ranks: `lift_guards`;
- its reference for flex attention, which has no backward on CPUs in PyTorch: `dense_flex`;
- message counts, which PyTorch's `CommDebugMode` reads from PyTorch's collectives: `Uncounted`. Longspan sends inside
  its operator, so that a cell that compares them is reported as "counts not compared".

Each test runs in processes of its own with a time limit. Each cell, a subtest or a call of a `_test_*` method, gets a
line, except that cells that cannot run here are counted; after a cell that is refused or fails, new processes
continue with the next one. Exits with 1 if a cell failed.
"""

from __future__ import annotations

import argparse
import enum
import importlib
import importlib.util
import itertools
import multiprocessing
import os
import random
import re
import sys
import tempfile
import time
import traceback
import unittest
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import ModuleType
from typing import Any

OURS = "longspan.torch_api._attention"
REPLACED = "torch.distributed.tensor.experimental._attention"
"""The module that the file imports from. Names that it imports from others are the same objects in both."""

NO_CPU_KERNEL = ["EFFICIENT_ATTENTION", "CUDNN_ATTENTION"]
"""Backends of PyTorch's SDPA that do not exist on CPUs, so that tests have no reference there."""
PYTORCH_ALONE = {
    "test_attention_shard_without_cp": "it calls PyTorch's DTensor alone, which has no rules for CPU kernels"
}
"""Tests that call no replaced name and do not pass on CPUs whatever is replaced; they are not run."""
LIMITS_ON_CPUS = [
    "does not have a sharding strategy registered",
    "does not support backward on CPU",
    "No available kernel",
]
"""What PyTorch says on CPUs where its own context parallelism needs a GPU (`--module torch`)."""

PASSED, LIFTED, REFUSED, GPU, OMITTED, FAILED = STATUSES = [
    "passed",
    "runs where PyTorch raises",
    "refused",
    "needs a GPU",
    "left out by the file",
    "failed",
]
GRACE = 20.0
"""Seconds that other ranks have to report a cell after one of them reported that it did not pass."""


@dataclass(frozen=True)
class Job:
    """One test in one set of processes: cells before `first` were run before."""

    path: str
    module: str
    ranks: int
    cls: str
    test: str
    local: bool
    cell: str
    traceback: bool
    first: int = 0


@dataclass(frozen=True)
class Result:
    label: str
    status: str
    detail: str = ""
    seconds: float = 0.0


# -- in a rank: the file and what is lifted for it ---------------------------------------------------------------------


def lift_guards() -> None:
    """Let tests run without GPUs. Call it before the file is imported, since its decorators read these names."""
    if importlib.util.find_spec("expecttest") is None:  # PyTorch's tests derive from it; these use nothing of it
        sys.modules["expecttest"] = stand_in = ModuleType("expecttest")
        stand_in.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    from torch.testing._internal import common_cuda, common_distributed

    common_distributed.skip_if_lt_x_gpu = lambda *_args, **_kwargs: lambda test: test
    for flag in ("FLASH", "MEM_EFF", "CUDNN", "FUSED"):
        setattr(common_cuda, f"PLATFORM_SUPPORTS_{flag}_ATTENTION", True)


def world_size_of(case: Any, ranks: int) -> int:
    """Return the test's number of ranks; a test that asks for all GPUs gets `ranks`."""
    return int(case.world_size) or ranks


def dense_flex(query: Any, key: Any, value: Any, *, block_mask: Any, return_aux: Any = None) -> Any:
    """Return flex attention in plain tensor math with backward, in the dtype of the inputs: the mask function decides
    every pair. One batch row at a time, since the pairs of all would need several times the memory."""
    import torch
    from torch.nn.attention.flex_attention import AuxOutput

    i, j = torch.arange(query.shape[2])[:, None], torch.arange(key.shape[2])
    scale, outputs = query.shape[-1] ** -0.5, list[tuple[Any, Any]]()
    for b in range(query.shape[0]):
        heads = [block_mask.mask_mod(torch.tensor(b), torch.tensor(h), i, j) for h in range(block_mask.shape[1])]
        bias = torch.zeros(len(heads), *heads[0].shape).masked_fill_(~torch.stack(heads), -torch.inf)
        scores = torch.baddbmm(bias, query[b] * scale, key[b].transpose(-1, -2))
        lse = scores.logsumexp(-1)
        outputs.append(((scores - lse[..., None]).exp() @ value[b], lse))
    out, lse = (torch.stack(parts) for parts in zip(*outputs, strict=True))
    return out if return_aux is None else (out, AuxOutput(lse=lse))


@cache
def coarse_kernel(ranks: int) -> str:
    """Return by how much gradients of PyTorch's CPU kernel miss the file's tolerance in bfloat16, on one device; ""
    if they do not. The kernel is the same over ranks, and MATH cells, in float32, test the same calls."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    half = [torch.rand(2, 8, 1024 * ranks, 32, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    exact = [t.detach().double().requires_grad_() for t in half]
    for tensors in (half, exact):
        scaled_dot_product_attention(*tensors, is_causal=True).sum().backward()
    misses = 0
    for a, b in zip(half, exact, strict=True):
        assert a.grad is not None
        assert b.grad is not None
        misses += int(((a.grad - b.grad).abs() > 8e-3 * ranks + 1e-3 * ranks * b.grad.abs()).sum())
    return f"{misses} bfloat16 gradients of one device miss the tolerance, too" if misses else ""


class Uncounted:
    """Takes the place of `CommDebugMode`, which sees none of Longspan's messages and keeps functions from being
    compiled. Its counts equal any others, and the comparison is noted."""

    def __init__(self, cells: Cells) -> None:
        self._cells = cells

    def __enter__(self) -> Uncounted:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def get_comm_counts(self) -> dict[Any, Any]:
        class Counts(dict[Any, Any]):
            def __ne__(self, other: object) -> bool:
                cells.note = "counts not compared"
                return False

            __eq__ = object.__eq__

        cells = self._cells
        return Counts()


def load(job: Job, cells: Cells | None = None) -> ModuleType:
    """Import the file with guards lifted and, unless `--module torch`, with Longspan's names."""
    lift_guards()
    if job.module == "longspan":
        sys.modules[REPLACED] = importlib.import_module(OURS)
    spec = importlib.util.spec_from_file_location("pytorch_tests", job.path)
    assert spec is not None
    assert spec.loader is not None
    file = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = file
    spec.loader.exec_module(file)
    file.backends.append(file.SDPBackend.MATH)  # which tests in float32; GPUs have EFFICIENT for that
    file.compiled_flex_attention = dense_flex  # type: ignore[attr-defined]
    file.compiled_create_block_mask = file.create_block_mask  # type: ignore[attr-defined]  # the same, sooner on CPUs
    if job.module == "longspan" and cells is not None:
        file.CommDebugMode = lambda: Uncounted(cells)  # type: ignore[attr-defined]
    return file


def tests_of(job: Job, pipe: Connection) -> None:
    """Send every test of the file: class, test, number of ranks, and whether its ranks are simulated in one process."""
    with quiet(job):
        file = load(job)
    found: list[tuple[str, str, int, bool]] = []
    for name, cls in vars(file).items():
        if isinstance(cls, type) and issubclass(cls, unittest.TestCase) and not name.startswith("DTensor"):
            for test in unittest.TestLoader().getTestCaseNames(cls):
                local = bool(getattr(cls(test), "is_local_tensor_enabled", False))
                found.append((name, test, world_size_of(cls(test), job.ranks), local))
    pipe.send(found)


# -- in a rank: cells --------------------------------------------------------------------------------------------------


class Cells:
    """Runs the cells of one test, and reports each to the parent, which answers when all ranks have reported it."""

    def __init__(self, job: Job, pipe: Connection) -> None:
        self.job, self.pipe = job, pipe
        self.index = 0
        self.note = ""
        self.expected: tuple[Any, str] | None = None
        self.inside = False

    def install(self, cls: type) -> None:
        """Make calls of `_test_*` methods, `run_subtests` and `subTest` of the class report cells."""
        for name, function in list(vars(cls).items()):
            if name.startswith("_test_") and callable(function):
                setattr(cls, name, self._method(function))
        cells = self

        def run_subtests(_: Any, axes: dict[str, list[Any]], test: Callable[..., Any]) -> None:
            import torch

            for values in itertools.product(*axes.values()):
                torch._dynamo.reset()
                test(**dict(zip(axes, values, strict=True)))

        def assert_raises(case: Any, kinds: Any, pattern: str) -> Any:
            return cells._raising(case, kinds, pattern)

        cls.run_subtests = run_subtests  # type: ignore[attr-defined]
        cls.subTest = lambda _, **axes: cells._subtest(axes)  # type: ignore[attr-defined]
        cls.assertRaisesRegex = assert_raises  # type: ignore[attr-defined]

    def _method(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(case: Any, *args: Any, **kwargs: Any) -> Any:
            if self.inside:
                return function(case, *args, **kwargs)
            expected, self.expected = self.expected, None
            label = label_of(kwargs) + ("" if expected is None else " (must raise)")
            index = self._next(label)
            if index is None:
                return None
            backend = getattr(kwargs.get("backend"), "name", "")
            if backend in NO_CPU_KERNEL:
                self._end(index, Result(label, GPU, f"{backend} has no kernel on CPUs"))
                return None
            result = self._run(label, lambda: function(case, *args, **kwargs), expected)
            if result.status == FAILED and backend == "FLASH_ATTENTION" and "not close" in result.detail:
                result = (
                    Result(label, GPU, coarse_kernel(case.world_size)) if coarse_kernel(case.world_size) else result
                )
            self._end(index, result)
            return None

        return call

    @contextmanager
    def _subtest(self, axes: dict[str, Any]) -> Iterator[None]:
        label = label_of(axes)
        index = self._next(label)
        started, result = time.perf_counter(), Result(label, PASSED)
        try:
            yield
        except Exception as error:
            result = self.result_of(label, error)
        if index is not None:
            self._end(index, Result(label, result.status, result.detail, time.perf_counter() - started), last=False)

    @contextmanager
    def _raising(self, case: Any, kinds: Any, pattern: str) -> Iterator[None]:
        index, self.expected = self.index, (kinds, pattern)
        try:
            if self.inside:
                with unittest.TestCase.assertRaisesRegex(case, kinds, pattern):  # noqa: PT027
                    yield
            else:
                yield
                if self.index == index:
                    raise AssertionError(f"{kinds} was not raised")
        finally:
            self.expected = None

    def _next(self, label: str) -> int | None:
        """Return the index of a cell that is to run, else None."""
        index, self.index = self.index, self.index + 1
        if index < self.job.first or self.job.cell not in label:
            return None
        self.note = ""
        self.pipe.send(("start", index, label))
        return index

    def _run(self, label: str, function: Callable[[], Any], expected: tuple[Any, str] | None) -> Result:
        import torch

        torch.manual_seed(self.index)  # the same on every rank; a cell that draws no numbers then ran nothing
        before, started, self.inside = torch.get_rng_state(), time.perf_counter(), True
        try:
            function()
            result = Result(label, PASSED, self.note)
            if expected is not None:
                result = Result(label, LIFTED, f"right, instead of {expected[0].__name__}: {expected[1]}")
            elif torch.equal(torch.get_rng_state(), before):
                result = Result(label, OMITTED)
        except Exception as error:
            if expected is not None and isinstance(error, expected[0]) and re.search(expected[1], str(error)):
                result = Result(label, PASSED, f"raised {type(error).__name__}: {first_line(error)}")
            else:
                result = self.result_of(label, error)
        finally:
            self.inside = False
        return Result(label, result.status, result.detail, time.perf_counter() - started)

    def _end(self, index: int, result: Result, last: bool | None = None) -> None:
        """Report, then wait for the other ranks. After a result with an error, the parent ends these processes unless
        `last` is False."""
        last = result.status in (FAILED, REFUSED) if last is None else last
        self.pipe.send(("end", index, result, last))
        self.pipe.recv()

    def result_of(self, label: str, error: BaseException) -> Result:
        from longspan.errors import LongspanError

        causes = [error]
        while causes[-1].__cause__ is not None:
            causes.append(causes[-1].__cause__)
        for cause in causes:
            if isinstance(cause, LongspanError):
                return Result(label, REFUSED, f"{type(cause).__name__}: {first_line(cause)}")
        if isinstance(error, unittest.SkipTest):
            return Result(label, OMITTED, first_line(error))
        text = f"{type(error).__name__}: {first_line(error)}"
        limit = next((str(c) for c in causes if any(part in str(c) for part in LIMITS_ON_CPUS)), "")
        if self.job.module == "torch" and limit:
            return Result(label, GPU, limit.splitlines()[0])
        if self.job.traceback:
            text += "\n" + "".join(traceback.format_exception(error))
        return Result(label, FAILED, text)


def first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else ""


def label_of(axes: dict[str, Any]) -> str:
    """Return the axes of a cell as text, without tensors, masks and lists."""
    named = {
        name: value.name if isinstance(value, enum.Enum) else getattr(value, "name", value)
        for name, value in axes.items()
    }
    return " ".join(f"{name}={value}" for name, value in named.items() if isinstance(value, bool | int | str))


@contextmanager
def quiet(job: Job) -> Iterator[None]:
    """Drop what the file prints and warns of, unless tracebacks are wanted."""
    with open(os.devnull, "w") as nowhere, warnings.catch_warnings():
        if not job.traceback:
            warnings.simplefilter("ignore")
            for stream in (1, 2):
                os.dup2(nowhere.fileno(), stream)
        yield


def run_test(job: Job, rank: int, meeting: str, pipe: Connection) -> None:
    """Run one test as one rank, cells from `job.first` on."""
    import torch

    torch.set_num_threads(1)
    cells = Cells(job, pipe)
    started = time.perf_counter()
    with quiet(job):
        try:
            cls = getattr(load(job, cells), job.cls)
            cells.install(cls)
            case = cls(job.test)
            if not case.world_size:
                cls.world_size = property(lambda _: job.ranks)
            if job.local:
                case.setUp()
            else:
                case.rank, case.file_name = rank, meeting
            torch.manual_seed(0)  # the same on every rank, as in PyTorch's runner
            random.seed(0)
            getattr(case, job.test)()
            result = Result("", PASSED, cells.note)
        except BaseException as error:
            result = cells.result_of("", error)
    pipe.send(("finished", cells.index, Result("", result.status, result.detail, time.perf_counter() - started), True))
    pipe.recv()
    os._exit(0)  # groups and threads of the test need not end in order


# -- the parent --------------------------------------------------------------------------------------------------------


class Processes:
    """The ranks of one job; `events` yields what all of them reported, merged to the worst result."""

    def __init__(self, target: Callable[..., None], world_size: int, *args: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch._dynamo", "longspan.torch_api"])
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(world_size):
            here, there = context.Pipe()
            ranked = (rank,) if target is run_test else ()
            head, *tail = args
            process = context.Process(target=target, args=(head, *ranked, *tail, there), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(10)

    def events(self, timeout: float) -> Iterator[tuple[str, int, Result, bool]]:
        """Yield ("end" or "finished", index, merged result, whether the ranks cannot continue)."""
        label, index = "", 0
        while True:
            heard: dict[Connection, tuple[str, int, Result, bool]] = {}
            limit = time.monotonic() + timeout
            while len(heard) < len(self.pipes):
                ready = wait([p for p in self.pipes if p not in heard], max(0.0, limit - time.monotonic()))
                if not ready:
                    break
                for pipe in ready:
                    assert isinstance(pipe, Connection)
                    try:
                        kind, index, *rest = pipe.recv()
                    except EOFError:
                        kind, rest = "finished", [Result(label, FAILED, "a rank ended without a result"), True]
                    if kind == "start":
                        label = rest[0]
                        continue
                    heard[pipe] = (kind, index, rest[0], rest[1])
                    if rest[0].status in (FAILED, REFUSED):
                        limit = min(limit, time.monotonic() + GRACE)
            if not heard:
                yield "end", index, Result(label, FAILED, f"no result within {timeout:.0f} s", timeout), True
                return
            worst = max(heard.values(), key=lambda event: STATUSES.index(event[2].status))
            silent = len(heard) < len(self.pipes) and worst[2].status not in (FAILED, REFUSED)
            if silent:
                worst = (
                    "end",
                    worst[1],
                    Result(label, FAILED, f"a rank gave no result within {timeout:.0f} s", timeout),
                    True,
                )
            yield worst
            if worst[0] == "finished" or worst[3]:
                return
            for pipe in self.pipes:
                pipe.send(None)


def results_of(job: Job, world_size: int, timeout: float) -> Iterator[Result]:
    """Yield the result of every cell of a test, or of the test if it has no cells."""
    if job.test in PYTORCH_ALONE:
        yield Result("", GPU, PYTORCH_ALONE[job.test])
        return
    found = False
    while True:
        with tempfile.TemporaryDirectory() as folder:
            processes = Processes(run_test, 1 if job.local else world_size, job, os.path.join(folder, "meeting"))
            try:
                kind, index, result = "finished", 0, Result("", FAILED, "nothing was reported")
                for kind, index, result, _ in processes.events(timeout):  # noqa: B007
                    if kind == "end":
                        found = True
                        yield result
            finally:
                processes.end()
        if kind == "finished":
            if not found or result.status not in (PASSED, OMITTED):
                yield result
            return
        job = Job(**{**vars(job), "first": index + 1})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path, help="PyTorch's test_attention.py")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of tests that ask for all GPUs")
    parser.add_argument("--only", default="", help="a part of Class.test")
    parser.add_argument("--cell", default="", help="a part of a cell's line, as in compiled=False")
    parser.add_argument(
        "--module", choices=("longspan", "torch"), default="longspan", help="whose names the file imports"
    )
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one cell")
    parser.add_argument("--traceback", action="store_true", help="print tracebacks and the output of the file")
    args = parser.parse_args()
    os.environ.update(CUDA_VISIBLE_DEVICES="", GLOO_SOCKET_IFNAME="lo")
    job = Job(str(args.path.resolve()), args.module, args.ranks, "", "", False, args.cell, args.traceback)
    lister = Processes(tests_of, 1, job)
    tests = lister.pipes[0].recv()
    lister.end()
    print(
        f"names of {args.module}; the reference of flex attention is a dense one; messages of Longspan are not counted"
    )
    totals: dict[str, Counter[str]] = {}
    for cls, test, world_size, local in tests:
        if args.only not in f"{cls}.{test}":
            continue
        print(f"\n{cls}.{test}, {world_size} ranks{' simulated in one process' if local else ''}", flush=True)
        total, not_run = totals.setdefault(f"{cls}.{test}", Counter()), Counter[str]()
        for result in results_of(
            Job(**{**vars(job), "cls": cls, "test": test, "local": local}), world_size, args.timeout
        ):
            total[result.status] += 1
            text = f"{result.status}: {result.detail}" if result.detail else result.status
            if result.status in (GPU, OMITTED):
                not_run[text] += 1
            else:
                print(f"  {result.label or test}, {result.seconds:.1f} s: {text}", flush=True)
        for text, number in not_run.items():
            print(f"  {number} x {text}", flush=True)
    print()
    for name, total in [*totals.items(), ("all", sum(totals.values(), Counter()))]:
        print(f"{name}: " + ", ".join(f"{total[status]} {status}" for status in STATUSES if total[status]))
    return int(any(total[FAILED] for total in totals.values()))


if __name__ == "__main__":
    sys.exit(main())
