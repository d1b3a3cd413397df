"""Mutants of recurrences over ranks: each changes a few words of the engine or of a planner, and a few problems of
test_scans.py must notice it."""

import inspect
import textwrap

import pytest

from longspan import recurrences
from longspan.mixers import scan_kernels, scan_run
from longspan.mixers.scan_run import GradientsWalk, LocalSegments, RankScan, StatesWalk, Tail
from longspan.planning import scan_plan, scan_steps
from longspan.planning.scan_steps import Chains, Draft
from longspan.run import walk
from tests.spread_cases import LIMIT, distances, loopback, one_device, problem

PROBLEMS = (
    {"form": "delta", "world": 4, "layout": "zigzag", "total": 24, "batch": 2, "scheme": "doubling"},
    {"form": "kda", "world": 3, "layout": "striped", "total": 17, "batch": 2, "scheme": "doubling"},
    {"form": "own matrix", "world": 5, "layout": "contiguous", "total": 24, "batch": 2, "scheme": "doubling"},
    {"form": "ssd with all", "world": 4, "layout": "zigzag", "total": 24, "batch": 2, "scheme": "doubling"},
    {"form": "gla", "world": 3, "layout": "striped", "total": 19, "batch": 2, "scheme": "chain"},
    {"form": "elements", "world": 4, "layout": "padded", "total": 20, "batch": 2, "scheme": "doubling"},
)
DOCUMENTS = [[11, 2, 0], [4, 9, 0]]


def drawn(number):
    """The problem of that number: rows with different documents, then one list for all, and none."""
    asked = PROBLEMS[number % len(PROBLEMS)]
    total = asked["total"]
    rows = [[a, b, total - a - b] for a, b, _ in DOCUMENTS]
    documents = (rows, rows[0], None)[(number + number // len(PROBLEMS)) % 3]
    return problem(100 + number, documents=documents, **asked)


EXPECTED = {}


def first_failure(count=12):
    """What goes wrong, or None."""
    for number in range(count):
        p = drawn(number)
        walk._built.clear()
        if number not in EXPECTED:
            EXPECTED[number] = one_device(p)
        try:
            made = p.plan()
            made.validate()
            found = distances(loopback(p, made), EXPECTED[number])
        except Exception as error:
            return f"{p}: {type(error).__name__}: {error}"
        if max(found.values()) > LIMIT:
            return f"{p}: {found}"
    return None


def edited(function, old, new):
    """The function with some words of its source replaced."""
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{old!r} is {source.count(old)} times in\n{source}"
    source = source.replace("super()", f"super({function.__qualname__.split('.')[0]}, self)")
    found = {}
    code = compile("from __future__ import annotations\n" + source.replace(old, new), "mutant", "exec")
    exec(code, inspect.unwrap(function).__globals__, found)
    return next(value for name, value in found.items() if name != "annotations")


MUTANTS = {
    # -- states
    "a state is lost": (
        RankScan, "forward",
        "_concat(results[:num], states)",
        "_concat(results[:num], states) * 0",
    ),
    "only the last segment's state enters": (
        scan_run, "apply_dense",
        "torch.matmul(m, left).add_(right)",
        "right.clone()",
    ),
    "only the last segment's state enters, diagonal": (
        scan_run, "apply_diagonal",
        "torch.addcmul(right, m, left)",
        "right",
    ),
    "what a segment adds is lost": (
        scan_run, "apply_dense",
        ".add_(right)",
        "",
    ),
    "M is transposed": (
        scan_run, "apply_dense",
        "torch.matmul(m,",
        "torch.matmul(m.mT,",
    ),
    "M is forgotten": (
        scan_run, "apply_diagonal",
        "torch.addcmul(right, m, left)",
        "right + left",
    ),
    "maps are composed the wrong way round": (
        StatesWalk, "_join",
        "maps = self.maps[right], self.maps[left]",
        "maps = self.maps[left], self.maps[right]",
    ),
    "maps are not composed": (
        StatesWalk, "_join",
        "maps = self.maps[right], self.maps[left]",
        "maps = self.maps[right], self.maps[right]",
    ),
    "left and right are mistaken": (
        StatesWalk, "_join",
        "self.states[left], self.states[right]",
        "self.states[right], self.states[left]",
    ),
    "states enter other segments": (
        LocalSegments, "build",
        "np.flatnonzero(entered[each])",
        "np.flatnonzero(entered[each])[::-1].copy()",
    ),
    "states of other segments leave": (
        LocalSegments, "build",
        "np.flatnonzero(left[each])",
        "np.flatnonzero(left[each])[::-1].copy()",
    ),
    "batch rows are mixed": (
        RankScan, "forward",
        "_concat(results[:num], states)",
        "_concat([x.flip(0) for x in results[:num]], states)",
    ),
    "the first head's states are everybody's": (
        RankScan, "forward",
        "_concat(results[:num], states)",
        "_concat(results[:num], states)[:, :1].expand(-1, states.shape[1], -1, -1).clone()",
    ),
    "segments are in the order of documents, slots are not": (
        Chains, "of_rank",
        "return local[np.lexsort((local[:, 0], local[:, 2]))]",
        "local[:, 2:] = local[local[:, 2].argsort()][:, 2:]; return local",
    ),
    "what arrives is unpacked in another order": (
        walk, "messages_of",
        "transfers.sort(key=lambda t: t.piece.order)",
        "transfers.sort(key=lambda t: t.piece.order, reverse=lists is receives)",
    ),
    # -- gradients
    "a gradient is lost": (
        RankScan, "backward",
        "_concat(results, gradients)",
        "_concat(results, gradients) * 0",
    ),
    "M is not transposed in backward": (
        scan_run, "apply_dense_transposed",
        "m.mT",
        "m",
    ),
    "a gradient is added twice": (
        scan_run, "_sum_into",
        "parts[1:]",
        "(*parts[1:], parts[-1])",
    ),
    "a gradient is left out of a sum": (
        scan_run, "_sum_into",
        "parts[1:]",
        "parts[2:]",
    ),
    "the left part's gradient lacks M": (
        GradientsWalk, "_split",
        "self._add(fold.left, self.recorder.call(apply, sources, self.format.state(fold.left)))",
        "self._add(fold.left, whole)",
    ),
    "the right part gets the left one's gradient": (
        GradientsWalk, "_split",
        "self._add(fold.right, whole)",
        "self._add(fold.right, self.recorder.call(apply, sources, self.format.state(fold.left)))",
    ),
    "the right part gets no gradient": (
        GradientsWalk, "_split",
        "self._add(fold.right, whole)",
        "self._add(fold.right, self.recorder.new(self.format.state(fold.right), self.format.dtype))",
    ),
    "kept maps are shuffled": (
        GradientsWalk, "__init__",
        "in plan.kept(rank)",
        "in plan.kept(rank)[::-1]",
    ),
    "gradients of entering states are mixed": (
        RankScan, "backward",
        "*gradients.split(self.local.rows[0])",
        "*gradients.flip(0).split(self.local.rows[0])",
    ),
    "the output's gradient counts twice": (
        Tail, "backward",
        "dout, leaving, *(None",
        "2 * dout, leaving, *(None",
    ),
    "gradients of states that enter do not end there": (
        Tail, "backward",
        "dout, leaving, *(None",
        "dout, leaving + leaving.mean(), *(None",
    ),
    "what enters is no part of the graph": (
        scan_run, "_compute",
        "kernel.local(work, whole)",
        "kernel.local(work, whole.detach())",
    ),
    "what leaves has no gradient": (
        scan_run, "_compute",
        "leaving[left]",
        "leaving[left].detach()",
    ),
    "parameters of an own recurrence are forgotten": (
        scan_kernels.OwnKernel, "local",
        "recurrence.local(*part, state)",
        "recurrence.local(*(x.detach() for x in part), state)",
    ),
    # -- plans
    "documents are not reset": (
        recurrences, "chains_of",
        "numbers[:, 1:] != numbers[:, :-1]",
        "numbers[:, 1:] < numbers[:, :-1]",
    ),
    "all batch rows have the first one's documents": (
        recurrences, "chains_of",
        "np.flatnonzero(borders[start])",
        "np.flatnonzero(borders[0])",
    ),
    "segments are numbered by owner": (
        scan_steps, "_segments",
        "place = np.arange(len(starts)) - np.searchsorted(chain, chain)",
        "place = np.lexsort((rank, chain)).argsort() - np.searchsorted(chain, chain)",
    ),
    "doubling reaches too far": (
        scan_plan.SCAN_PLANNERS, "doubling",
        "new[i] = starts[i - reach]",
        "new[i] = starts[0]",
    ),
    "doubling ends too early": (
        scan_plan.SCAN_PLANNERS, "doubling",
        "while reach < count",
        "while 2 * reach < count",
    ),
    "a chain hands on what it got": (
        scan_plan.SCAN_PLANNERS, "chain",
        "draft.send(step, (rank, after), chain, (0, i + 1))",
        "draft.send(step, (rank, after), chain, (0, max(i, 1)))",
    ),
    "backward's steps are not turned round": (
        scan_plan, "transpose_steps",
        "for number in reversed(range(count))",
        "for number in range(count)",
    ),
    "a fold is noted for another step": (
        Draft, "fold",
        "(step, rank, chain, first, middle, end)",
        "(0, rank, chain, first, middle, end)",
    ),
    "a rank is sent what it has": (
        Draft, "send",
        "and key not in self._has",
        "",
    ),
}  # fmt: skip


def plant(patch, owner, name, old, new):
    if isinstance(owner, dict):
        return patch.setitem(owner, name, edited(owner[name], old, new))
    static = isinstance(inspect.getattr_static(owner, name), staticmethod)
    found = edited(getattr(owner, name), old, new)
    return patch.setattr(owner, name, staticmethod(found) if static and not isinstance(found, staticmethod) else found)


def test_without_a_mutant_nothing_fails():
    assert first_failure() is None


def test_there_are_enough():
    assert len(MUTANTS) >= 35


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_killed(name, monkeypatch):
    plant(monkeypatch, *MUTANTS[name])
    assert first_failure(), f"{name}: nothing noticed it"
