"""Models of the Triton kernels that move, merge and multiply rows, in PyTorch's operators.

They take the arguments of the kernels, so that all of `run/fused.py` runs as it is, and find the rows of every program
in the table by address, as the kernels of `run/triton_kernels.py` beside it do; `fused_script` interprets those.
"""

import contextlib
import sys
from functools import partial
from types import SimpleNamespace

import torch

from longspan.run import fused
from longspan.run import merge as engine_merge

COLUMNS = 10
SECOND, FROM_MESSAGE, INTO_MESSAGE = 1, 2, 4
COPY, ADD, FILL = 0, 1, 2
OURS = "longspan.run.triton_kernels"


class Pointer:
    """A tensor's memory, perhaps as another dtype."""

    def __init__(self, tensor, dtype=None):
        self.tensor, self.dtype = tensor, dtype or tensor.dtype

    def cells(self, dim, offsets):
        """The whole storage as one line, and the numbers of the cells of rows at byte offsets from the tensor."""
        num_bytes, size = self.tensor.untyped_storage().nbytes(), self.dtype.itemsize
        whole = self.tensor.as_strided((num_bytes // self.tensor.element_size(),), (1,), 0)
        if whole.dtype != self.dtype:
            whole = whole.view(torch.uint8)[: num_bytes // size * size].view(self.dtype)
        places = (offsets + self.tensor.storage_offset() * self.tensor.element_size()) // size
        return whole, places[:, None] + torch.arange(dim)

    def check_alignment(self, dim, strides):
        """What a kernel is told to be aligned must be: it reads other memory else."""
        assert not any(number % fused.VECTOR for number in (self.tensor.data_ptr(), dim, *strides))


class Runs:
    """The lines, batch rows and heads of programs, and the rows of each inside of its run."""

    def __init__(self, table, low, high, steps, programs, rows_each):
        assert 1 << steps >= high - low
        lines = table.tensor[low * COLUMNS : high * COLUMNS].view(-1, COLUMNS)
        self.line = lines[torch.searchsorted(lines[:, 0].contiguous(), programs, right=True) - 1]
        rows, heads = self.line[:, 2], self.line[:, 3]
        blocks, block = -(-rows // rows_each), programs - self.line[:, 0]
        self.b, self.h = block // blocks // heads, block // blocks % heads
        self.i = (block % blocks)[:, None] * rows_each + torch.arange(rows_each)
        self.known = self.i < rows[:, None]

    def offsets(self, column, flag, strides, mine=slice(None)):
        """Byte offsets of all rows of one side, of some programs."""
        line, b, h = self.line[mine], self.b[mine], self.h[mine]
        x, y, z = line[:, column], line[:, column + 1], line[:, column + 2]
        plain = (x + b) * strides[0] + (y + h) * strides[1] + z * strides[2]
        first = torch.where((line[:, 1] & flag) != 0, x + b * y + h * z, plain)
        return (first[:, None] + self.i[mine] * strides[2])[self.known[mine]]


def rows_kernel(
    num_programs, table, low, high, steps, first, value, *args, KIND, ROWS, DIM, ALIGNED, enable_fp_fusion
):  # fmt: skip
    assert not enable_fp_fusion
    runs = Runs(table, low, high, steps, torch.arange(num_programs) + first, ROWS)
    for number, (source, target, dim, *strides) in enumerate((args[:9], args[9:])):
        mine = (runs.line[:, 1] & SECOND) == number
        if not mine.any():
            continue
        assert dim <= DIM
        if ALIGNED:
            source.check_alignment(dim, strides[:3])
            target.check_alignment(dim, strides[3:])
        whole, cells = target.cells(dim, runs.offsets(7, INTO_MESSAGE, strides[3:], mine))
        if KIND == FILL:
            whole[cells] = torch.tensor(value).to(whole.dtype)
            continue
        origin, from_cells = source.cells(dim, runs.offsets(4, FROM_MESSAGE, strides[:3], mine))
        part = origin[from_cells].to(whole.dtype)
        whole[cells] = whole[cells] + part if KIND == ADD else part


def state_kernel(
    num_programs, table, low, high, steps, acc, top, num, out, lse, dim, *strides,
    FINISH, TINY, ROWS, DIM, ALIGNED, enable_fp_fusion,
):  # fmt: skip
    assert not enable_fp_fusion
    assert dim <= DIM
    assert torch.finfo(acc.dtype).tiny == TINY
    runs = Runs(table, low, high, steps, torch.arange(num_programs), ROWS)
    found = []
    for number, pointer in enumerate((acc, top, num, out, lse)):
        by, width = strides[3 * number : 3 * number + 3], dim if number in (0, 3) else 1
        if ALIGNED and number in (0, 3):
            pointer.check_alignment(dim, by)
        column = 4 if (number < 3) == FINISH else 7
        found.append(pointer.cells(width, runs.offsets(column, 0, by)))
    state = [whole[cells] for whole, cells in found[:3]]
    if FINISH:
        written, results = found[3:], engine_merge.finished_rows(*state)
    else:
        part, stat = (whole[cells] for whole, cells in found[3:])
        engine_merge.merge(state[0], state[1][:, 0], state[2][:, 0], part, stat[:, 0])
        written, results = found[:3], state
    for (whole, cells), rows in zip(written, results, strict=True):
        whole[cells] = rows.to(whole.dtype)


def products_kernel(
    num_programs, dout, out, sums, tokens, heads, dim, *strides, ROWS, DIM, ALIGNED, enable_fp_fusion
):  # fmt: skip
    assert not enable_fp_fusion
    assert dim <= DIM
    blocks, program = -(-tokens // ROWS), torch.arange(num_programs)
    plane, i = program // blocks, (program % blocks)[:, None] * ROWS + torch.arange(ROWS)
    known = i < tokens
    rows = []
    for pointer, by in ((dout, strides[:3]), (out, strides[3:])):
        if ALIGNED:
            pointer.check_alignment(dim, by)
        first = plane // heads * by[0] + plane % heads * by[1]
        whole, cells = pointer.cells(dim, (first[:, None] + i * by[2])[known])
        rows.append(whole[cells].to(sums.dtype))
    size = sums.dtype.itemsize
    whole, cells = sums.cells(1, (plane[:, None] * tokens + i)[known] * size)
    whole[cells] = (rows[0] * rows[1]).sum(-1, keepdim=True)


class Kernel:
    """A function in the place of a Triton kernel."""

    def __init__(self, function, launch):
        self.function, self.launch = function, launch

    def __getitem__(self, grid):
        return partial(self._run, *grid)

    def _run(self, *args, **constants):
        pointers = [Pointer(x) if isinstance(x, torch.Tensor) else x for x in args]
        self.launch(self.function, pointers, constants)


def at_once(function, args, constants):
    with torch.no_grad():
        function(*args, **constants)


def install(launch=at_once):
    """Use the models on all devices; small programs, so that runs have several. `launch` runs a function on CPU tensors
    that have the memory of its pointers."""
    fused.is_fused = lambda device: device.type != "cpu"
    fused.CELLS, fused._pointer = 64, Pointer
    kernels = {function.__name__: Kernel(function, launch) for function in (rows_kernel, state_kernel, products_kernel)}
    sys.modules[OURS] = SimpleNamespace(**kernels)


@contextlib.contextmanager
def installed():
    names = ("is_fused", "CELLS", "_pointer")
    before, module = {name: getattr(fused, name) for name in names}, sys.modules.get(OURS)
    install()
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(fused, name, value)
        sys.modules.pop(OURS)
        if module is not None:
            sys.modules[OURS] = module
