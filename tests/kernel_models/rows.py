"""Models of the Triton kernels that move and merge rows, in PyTorch's operators.

They find the rows of every program in the table on the device, by address, as the kernels do, and never ask the host.
Rows beyond the end of a run are its last row again, so that all programs have the same number of rows.
"""

import contextlib

import torch

from longspan.run import fused
from longspan.run import merge as engine_merge

COLUMNS = 10
calls = {"move": 0, "two": 0, "merge": 0, "finish": 0}


def _runs(table, lines):
    """Lines, batch rows, heads and rows inside the run, of all rows of all programs."""
    lines_of = table[lines.low * COLUMNS : lines.high * COLUMNS].view(-1, COLUMNS)
    programs = torch.arange(lines.programs, device=table.device) + lines.first
    line = lines_of[torch.searchsorted(lines_of[:, 0].contiguous(), programs, right=True) - 1]
    rows, heads = line[:, 2], line[:, 3]
    blocks = (rows + lines.rows - 1).div(lines.rows, rounding_mode="floor")
    block = programs - line[:, 0]
    plane = block.div(blocks, rounding_mode="floor")
    i = (block % blocks)[:, None] * lines.rows + torch.arange(lines.rows, device=table.device)
    return line, plane.div(heads, rounding_mode="floor"), plane % heads, i.minimum(rows[:, None] - 1)


def _flat(tensor, dtype):
    """The whole storage of a tensor as one line of a dtype, and where the tensor begins in it, in bytes."""
    whole = tensor.as_strided((tensor.untyped_storage().nbytes() // tensor.element_size(),), (1,), 0)
    if tensor.dtype != dtype:
        size = torch.empty(0, dtype=dtype).element_size()
        whole = whole[: whole.numel() // size * size].view(dtype)
    return whole, tensor.storage_offset() * tensor.element_size()


def _places(runs, column, flag, strides):
    """Byte offsets of all rows of one side."""
    line, b, h, i = runs
    x, y, z = line[:, column], line[:, column + 1], line[:, column + 2]
    inside = x + b * y + h * z
    plain = (x + b) * strides[0] + (y + h) * strides[1] + z * strides[2]
    first = torch.where((line[:, 1] & flag) != 0, inside, plain)
    return (first[:, None] + i * strides[2]).flatten()


def _cells(tensor, dtype, dim, offsets):
    whole, start = _flat(tensor, dtype)
    places = (offsets + start).div(whole.element_size(), rounding_mode="floor")
    return whole, places[:, None] + torch.arange(dim, device=tensor.device)


def _strides(place):
    if place.is_message:
        return 0, 0, place.dim * place.dtype.itemsize
    return [stride * place.dtype.itemsize for stride in place.tensor.stride()[:3]]


def move_rows(table, lines, moves, kind, value=0.0):
    if (
        len({(source.dtype, target.dtype) for source, target in moves if kind == "add" or source.dtype != target.dtype})
        > 1
    ):
        return False
    calls["two" if len(moves) == 2 else "move"] += 1
    line, b, h, i = _runs(table, lines)
    for number, (source, target) in enumerate(moves):
        # Without knowing on the host which programs are of this move, all run it, and those of others change nothing.
        mine = ((line[:, 1] & 1) == number)[:, None].expand_as(i).flatten()[:, None]
        runs = line, b, h, i
        spot = torch.where(mine[:, 0], _places(runs, 7, 4, _strides(target)), 0)
        whole, cells = _cells(target.tensor, target.dtype, target.dim, spot)
        old = whole[cells]
        if kind == "fill":
            new = torch.full_like(old, value)
        else:
            spot = torch.where(mine[:, 0], _places(runs, 4, 2, _strides(source)), 0)
            origin, from_cells = _cells(source.tensor, source.dtype, source.dim, spot)
            part = origin[from_cells].to(old.dtype)
            new = old + part if kind == "add" else part
        _write(whole, cells, new, old, mine)
    return True


def _write(whole, cells, new, old, mine):
    """Write the rows that are `mine`; others are written to a cell behind the end, which is dropped."""
    longer = torch.cat((whole, whole.new_zeros(1)))
    longer[torch.where(mine, cells, whole.numel())] = torch.where(mine, new, old)
    whole.copy_(longer[:-1])


def _state(table, lines, state, out, lse, finishes):
    runs = _runs(table, lines)
    columns = (4, 4, 4, 7, 7) if finishes else (7, 7, 7, 4, 4)
    found = []
    for tensor, column in zip((*state, out, lse), columns, strict=True):
        strides = [stride * tensor.element_size() for stride in tensor.stride()[:3]]
        found.append(_cells(tensor, tensor.dtype, tensor.shape[3], _places(runs, column, 0, strides)))
    return found, [whole[cells] for whole, cells in found]


def merge_rows(table, lines, state, out, lse):
    calls["merge"] += 1
    found, (acc, top, num, part, stat) = _state(table, lines, state, out, lse, False)
    engine_merge.merge(acc, top[:, 0], num[:, 0], part, stat[:, 0])
    for (whole, cells), rows in zip(found, (acc, top, num), strict=False):
        whole[cells] = rows


def finish_rows(table, lines, out, lse, state):
    calls["finish"] += 1
    found, (acc, top, num, _, _) = _state(table, lines, state, out, lse, True)
    for (whole, cells), rows in zip(found[3:], engine_merge.finished_rows(acc, top, num), strict=True):
        whole[cells] = rows.to(whole.dtype)


def install():
    """Use the models on all devices; small programs, so that runs have several."""
    fused.is_fused = lambda device: device.type != "cpu"
    fused.CELLS = 64
    fused.move_rows, fused.merge_rows, fused.finish_rows = move_rows, merge_rows, finish_rows


@contextlib.contextmanager
def installed():
    names = ("is_fused", "CELLS", "move_rows", "merge_rows", "finish_rows")
    before = {name: getattr(fused, name) for name in names}
    install()
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(fused, name, value)
