"""Models of the Triton kernels that move and merge rows, in PyTorch's operators.

They take the arguments of the kernels, so that all of `run/fused.py` runs as it is. They find the rows of every program
in the table on the device, by address, as the kernels do, and never ask the host. Rows beyond the end of a run are its
last row again, so that all programs have the same number of rows.
"""

import contextlib
import sys
from types import SimpleNamespace

import torch

from longspan.run import fused
from longspan.run import merge as engine_merge

COLUMNS = 10
COPY, ADD, FILL = 0, 1, 2
OURS = "longspan.run.triton_kernels"


class Kernel:
    """A function in the place of a Triton kernel."""

    def __init__(self, function):
        self.function = function

    def __getitem__(self, grid):
        return lambda *args, **constants: self.function(*grid, *args, **constants)


class Pointer:
    """A tensor's memory as another dtype."""

    def __init__(self, tensor, dtype):
        self.tensor, self.dtype = tensor, dtype

    def __eq__(self, other):
        return self.tensor is other.tensor and self.dtype == other.dtype

    def cells(self, dim, offsets):
        """The whole storage as one line, and the numbers of the cells of rows at byte offsets from the tensor."""
        num_bytes, size = self.tensor.untyped_storage().nbytes(), self.dtype.itemsize
        whole = self.tensor.as_strided((num_bytes // self.tensor.element_size(),), (1,), 0)
        if whole.dtype != self.dtype:
            whole = whole.view(torch.uint8)[: num_bytes // size * size].view(self.dtype)
        start = self.tensor.storage_offset() * self.tensor.element_size()
        places = (offsets + start).div(size, rounding_mode="floor")
        return whole, places[:, None] + torch.arange(dim, device=whole.device)

    def check_alignment(self, dim, strides):
        """What a kernel is told to be aligned must be: it reads other memory else."""
        assert not any(number % fused.VECTOR for number in (self.tensor.data_ptr(), dim, *strides))


def _runs(table, low, high, steps, first, programs, rows_each):
    """Lines, batch rows, heads and rows inside the run, of all rows of all programs."""
    assert 1 << steps >= high - low
    lines = table[low * COLUMNS : high * COLUMNS].view(-1, COLUMNS)
    program = torch.arange(programs, device=table.device) + first
    line = lines[torch.searchsorted(lines[:, 0].contiguous(), program, right=True) - 1]
    rows, heads = line[:, 2], line[:, 3]
    blocks = (rows + rows_each - 1).div(rows_each, rounding_mode="floor")
    block = program - line[:, 0]
    plane = block.div(blocks, rounding_mode="floor")
    i = (block % blocks)[:, None] * rows_each + torch.arange(rows_each, device=table.device)
    return line, plane.div(heads, rounding_mode="floor"), plane % heads, i.minimum(rows[:, None] - 1)


def _places(runs, column, flag, strides):
    """Byte offsets of all rows of one side."""
    line, b, h, i = runs
    x, y, z = line[:, column], line[:, column + 1], line[:, column + 2]
    inside = x + b * y + h * z
    plain = (x + b) * strides[0] + (y + h) * strides[1] + z * strides[2]
    first = torch.where((line[:, 1] & flag) != 0, inside, plain)
    return (first[:, None] + i * strides[2]).flatten()


def rows_kernel(programs, table, low, high, steps, first, value, *args, KIND, ROWS, DIM, ALIGNED, enable_fp_fusion):
    assert not enable_fp_fusion
    runs = _runs(table, low, high, steps, first, programs, ROWS)
    moves = [(_as_pointer(part[0]), _as_pointer(part[1]), *part[2:]) for part in (args[:9], args[9:])]
    is_one = moves[0] == moves[1]  # then flags do not matter
    for number, (source, target, dim, *strides) in enumerate(moves[:1] if is_one else moves):
        assert dim <= DIM
        if ALIGNED:
            source.check_alignment(dim, strides[:3])
            target.check_alignment(dim, strides[3:])
        # Without knowing on the host which programs are of this move, all run it, and those of others change nothing.
        second = (runs[0][:, 1] & 1)[:, None].expand_as(runs[3]).flatten()
        mine = second >= 0 if is_one else second == number
        spot = torch.where(mine, _places(runs, 7, 4, strides[3:]), 0)
        whole, cells = target.cells(dim, spot)
        old = whole[cells]
        if KIND == FILL:
            new = torch.full_like(old, value)
        else:
            spot = torch.where(mine, _places(runs, 4, 2, strides[:3]), 0)
            origin, from_cells = source.cells(dim, spot)
            part = origin[from_cells].to(old.dtype)
            new = old + part if KIND == ADD else part
        _write(whole, cells, new, old, mine[:, None])


def _as_pointer(tensor):
    return tensor if isinstance(tensor, Pointer) else Pointer(tensor, tensor.dtype)


def _write(whole, cells, new, old, mine):
    """Write the rows that are `mine`; others are written to a cell behind the end, which is dropped."""
    longer = torch.cat((whole, whole.new_zeros(1)))
    longer[torch.where(mine, cells, whole.numel())] = torch.where(mine, new, old)
    whole.copy_(longer[:-1])


def state_kernel(
    programs, table, low, high, steps, acc, top, num, out, lse, dim, *strides, FINISH, TINY, ROWS, DIM, ALIGNED,
    enable_fp_fusion,
):  # fmt: skip
    assert not enable_fp_fusion
    assert dim <= DIM
    assert torch.finfo(acc.dtype).tiny == TINY
    runs = _runs(table, low, high, steps, 0, programs, ROWS)
    found = []
    for number, tensor in enumerate((acc, top, num, out, lse)):
        pointer, by, width = _as_pointer(tensor), strides[3 * number : 3 * number + 3], dim if number in (0, 3) else 1
        if ALIGNED and width == dim:
            pointer.check_alignment(dim, by)
        column = 4 if (number < 3) == FINISH else 7
        found.append(pointer.cells(width, _places(runs, column, 0, by)))
    state = [whole[cells] for whole, cells in found[:3]]
    if FINISH:
        written, results = found[3:], engine_merge.finished_rows(*state)
    else:
        part, stat = (whole[cells] for whole, cells in found[3:])
        engine_merge.merge(state[0], state[1][:, 0], state[2][:, 0], part, stat[:, 0])
        written, results = found[:3], state
    for (whole, cells), rows in zip(written, results, strict=True):
        whole[cells] = rows.to(whole.dtype)


def install():
    """Use the models on all devices; small programs, so that runs have several."""
    fused.is_fused = lambda device: device.type != "cpu"
    fused.CELLS, fused._pointer = 64, Pointer
    sys.modules[OURS] = SimpleNamespace(rows_kernel=Kernel(rows_kernel), state_kernel=Kernel(state_kernel))


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
