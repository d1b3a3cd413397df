"""`plan.prepare` and `training.prefetch`: order, exceptions, exit, and threads that need the same program."""

import os
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch

import longspan as ls
from longspan.device_tables import keep_recent
from longspan.mixers import convolution, scan_kernels, scan_reference, scan_run, scans
from longspan.run import walk
from longspan.run.walk import PlanWalk
from longspan.training import prefetch

SIZES = {"q_heads": 2, "kv_heads": 1, "head_dim": 8, "dtype": "float64"}


def _counted(monkeypatch, slow=0.0):
    """The threads that record programs."""
    recorded, program = [], PlanWalk.program

    def noted(self):
        recorded.append(threading.current_thread().name)
        time.sleep(slow)
        return program(self)

    monkeypatch.setattr(PlanWalk, "program", noted)
    return recorded


def _call(plan, **options):
    torch.manual_seed(0)
    q, k, v, dout = (torch.randn(1, heads, 40, 8, dtype=torch.float64) for heads in (2, 1, 1, 2))
    inputs = [t.requires_grad_() for t in (q, k, v)]
    out = ls.attention(*inputs, plan, **options)
    return [out, *torch.autograd.grad(out, inputs, dout)]


def _plan(seed):
    mask = ls.masks.documents([seed, 40 - seed]) & ls.masks.causal()
    return ls.plan(mask, ls.layouts.contiguous(40, 1), **SIZES)


def test_a_prepared_plan_records_nothing_in_its_first_call(monkeypatch):
    expected = _call(ls.masks.documents([7, 33]) & ls.masks.causal())
    recorded = _counted(monkeypatch)
    plan = _plan(7)
    plan.prepare(0)
    assert len(recorded) == 2
    found = _call(plan)
    assert len(recorded) == 2
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_without_backward_and_with_another_kernel_programs_are_recorded_when_they_are_needed(monkeypatch):
    recorded = _counted(monkeypatch)
    plan = _plan(8)
    plan.prepare(0, backward=False)
    assert len(recorded) == 1
    _call(plan, kernel="reference")
    assert len(recorded) == 3
    plan = _plan(9)
    plan.prepare(0, "cpu", kernel="reference")
    assert len(recorded) == 5
    _call(plan, kernel="reference")
    assert len(recorded) == 5


def test_a_mask_function_whose_data_changed_is_refused():
    table = torch.ones(40, dtype=torch.bool)
    mask = ls.masks.from_mask_mod(lambda b, h, q, k: (q >= k) & table[k], seq_len=40)
    plan = ls.plan(mask, ls.layouts.contiguous(40, 1), **SIZES)
    plan.prepare(0)
    _call(plan)
    table[10:20] = False
    with pytest.raises(ls.MaskError, match="was changed in place"):
        _call(plan)


def test_a_call_waits_for_the_thread_that_prepares_its_plan(monkeypatch):
    recorded = _counted(monkeypatch, slow=0.3)
    plan = _plan(11)
    thread = threading.Thread(target=plan.prepare, args=(0,), name="preparing")
    thread.start()
    while not recorded:
        time.sleep(0.001)
    _call(plan)
    thread.join()
    assert recorded.count("preparing") >= 1
    assert len(recorded) == 2  # each direction once, by either thread


def _convolve(plan):
    torch.manual_seed(0)
    x, dout = torch.randn(2, 1, 96, 6, dtype=torch.float64)
    weight = torch.randn(6, 3, dtype=torch.float64)
    inputs = [t.requires_grad_() for t in (x, weight)]
    out = ls.causal_conv1d(*inputs, plan=plan)
    return [out, *torch.autograd.grad(out, inputs, dout)]


def _recur(plan):
    torch.manual_seed(0)
    q, k, v, dout = torch.randn(4, 1, 96, 2, 4, dtype=torch.float64)
    g, beta = -torch.rand(2, 1, 96, 2, dtype=torch.float64)
    inputs = [t.requires_grad_() for t in (q, k, v, g, beta)]
    out = ls.gated_delta_rule(*inputs, plan=plan)
    return [out, *torch.autograd.grad(out, inputs, dout)]


def _mixer_plan(kind, seed):
    layout = ls.layouts.Layout.from_spans(96, [[(48, 96), (0, 48)]])  # out of order: documents are cut
    lengths = [seed, *[2] * 40, 16 - seed]  # more segments than are convolved one by one
    if kind == "convolution":
        return ls.conv_plan(lengths, layout, channels=6, width=3, dtype="float64")
    return ls.scan_plan(lengths, layout, heads=2, keys=4, values=4, maps="matrix", dtype="float64")


MIXERS = {"convolution": _convolve, "recurrence": _recur}


def _count_tables(monkeypatch, slow=0.0):
    """The threads that record programs and build tables of convolutions and recurrences."""
    built = _counted(monkeypatch, slow)
    for module in (convolution, scan_run, scan_reference):

        def noted(table, device, copy=module.to_device):
            built.append(threading.current_thread().name)
            time.sleep(slow)
            return copy(table, device)

        monkeypatch.setattr(module, "to_device", noted)
    for part in (convolution.OwnRows, scan_run.LocalSegments):

        def build(*args, original=part.build):
            built.append(threading.current_thread().name)
            time.sleep(slow)
            return original(*args)

        monkeypatch.setattr(part, "build", staticmethod(build))
    return built


@pytest.mark.parametrize("kind", MIXERS)
def test_prepared_plans_of_mixers_build_nothing_in_their_first_call(monkeypatch, kind):
    call, whole = MIXERS[kind], _mixer_plan(kind, 5)
    built = _count_tables(monkeypatch)
    expected = call(whole)
    num_built = len(built)
    assert num_built > 2
    walk._built.clear()  # also of plans that are equal
    scan_reference._build_chunk_table.cache_clear()
    plan = _mixer_plan(kind, 5)
    plan.prepare(0)
    assert len(built) == 2 * num_built
    found = call(plan)
    assert len(built) == 2 * num_built
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("kind", MIXERS)
def test_plans_of_mixers_prepared_without_backward_record_it_when_it_runs(monkeypatch, kind):
    recorded, plan = _counted(monkeypatch), _mixer_plan(kind, 6)
    plan.prepare(0, backward=False)
    assert len(recorded) == 1
    MIXERS[kind](plan)
    assert len(recorded) == 2


@pytest.mark.parametrize("kind", MIXERS)
def test_a_mixer_waits_for_the_thread_that_prepares_its_plan(monkeypatch, kind):
    call, plan = MIXERS[kind], _mixer_plan(kind, 7)
    built = _count_tables(monkeypatch)
    expected = call(plan)
    num_built, plan = len(built), _mixer_plan(kind, 8)
    built.clear()
    monkeypatch.undo()
    built = _count_tables(monkeypatch, slow=0.02)
    thread = threading.Thread(target=plan.prepare, args=(0,), name="preparing")
    thread.start()
    while not built:
        time.sleep(0.001)
    found = call(plan)
    thread.join()
    assert "preparing" in built
    assert len(built) == num_built  # everything once, by either thread
    assert len(found) == len(expected)


def test_a_recurrence_is_prepared_for_the_kernel_that_ran_last(monkeypatch):
    prepared = []
    fla = scan_kernels.scan_kernel_named("fla")
    monkeypatch.setattr(fla, "prepare", lambda *_: prepared.append("fla"))
    plan = _mixer_plan("recurrence", 9)
    plan.prepare(0, kernel="fla")
    assert prepared == ["fla", "fla"]  # tables of all segments, and of those that others follow
    monkeypatch.setitem(scans._last_kernels, (plan.sizes, torch.device("cpu")), fla)
    plan.prepare(0)
    assert len(prepared) == 4
    _recur(plan)  # on `reference`
    plan.prepare(0)
    assert len(prepared) == 4


@pytest.mark.parametrize(
    ("kind", "options", "match"),
    [
        ("convolution", {"kernel": "fla"}, "kernel must be 'auto'"),
        ("recurrence", {"kernel": "flex"}, "kernel must be one of"),
        ("convolution", {"rank": 1}, "rank must be 0 to 0"),
        ("recurrence", {"rank": -1}, "rank must be 0 to 0"),
    ],
)
def test_mixers_are_not_prepared_for_other_kernels_and_ranks(kind, options, match):
    with pytest.raises(ls.LongspanError, match=match):
        _mixer_plan(kind, 10).prepare(**{"rank": 0, **options})


def test_tables_that_are_there_are_returned_while_a_thread_builds_others():
    inside, done = threading.Event(), threading.Event()

    @keep_recent(least=2)
    def table(number):
        if number == 1:
            inside.set()
            assert done.wait(20)
        return (number,)

    table(0)
    thread = threading.Thread(target=table, args=(1,))
    thread.start()
    inside.wait(20)
    assert table(0) == (0,)  # does not wait for the thread, which waits for `done`
    done.set()
    thread.join()
    assert table(1) == (1,)


def test_a_forked_process_records_though_a_thread_of_its_parent_does():
    held = threading.Event()
    done = threading.Event()

    def hold():
        with walk._building:
            held.set()
            done.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    plan = _plan(12)
    child = os.fork()
    if not child:
        plan.prepare(0)
        os._exit(0)
    until = time.monotonic() + 20
    status = (0, 0)
    while not status[0] and time.monotonic() < until:
        status = os.waitpid(child, os.WNOHANG)
        time.sleep(0.01)
    done.set()
    thread.join()
    if not status[0]:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert status == (child, 0)


@pytest.mark.parametrize("rank", [-1, 1, "0"])
def test_other_ranks_are_refused(rank):
    with pytest.raises(ls.PlanError, match="rank must be 0 to 0"):
        _plan(13).prepare(rank)


def test_cpus_with_a_number_are_the_cpu(monkeypatch):
    recorded = _counted(monkeypatch)
    plan = _plan(19)
    plan.prepare(0, "cpu:1")
    plan.prepare(0, "cpu")
    _call(plan)
    assert len(recorded) == 2


def test_batches_come_in_order_and_one_ahead():
    begun = []

    def prepare(batch):
        begun.append(batch)
        return batch * 10

    seen = []
    for found in prefetch(range(5), prepare):
        seen.append(found)
        until = time.monotonic() + 10
        while len(begun) < min(len(seen) + 1, 5) and time.monotonic() < until:
            time.sleep(0.001)
        assert begun == list(range(min(len(seen) + 1, 5)))  # the next one, and no more
    assert seen == [0, 10, 20, 30, 40]
    assert list(prefetch([], prepare)) == []


@pytest.mark.parametrize("where", ["loader", "prepare"])
def test_an_exception_comes_where_its_batch_would(where):
    def batches():
        yield from (0, 1)
        if where == "loader":
            raise ValueError("batch 2")
        yield 2

    def prepare(batch):
        if batch == 2:
            raise ValueError("batch 2")
        return batch

    loop = prefetch(batches(), prepare)
    assert [next(loop), next(loop)] == [0, 1]
    with pytest.raises(ValueError, match="batch 2"):
        next(loop)


def test_an_error_of_prepare_comes_where_its_batch_would():
    loop = prefetch([0, 3], lambda rank: _mixer_plan("recurrence", 5).prepare(rank))
    assert next(loop) is None
    with pytest.raises(ls.PlanError, match="rank must be 0 to 0"):
        next(loop)


def test_leaving_the_loop_ends_the_thread():
    num_threads = threading.active_count()
    for batch in prefetch(range(100), lambda batch: batch):
        if batch == 3:
            break
    del batch
    assert threading.active_count() == num_threads


@pytest.mark.parametrize(("end", "status"), [("pass", 0), ("raise SystemExit(3)", 3), ("raise ValueError", 1)])
def test_a_program_that_ends_inside_the_loop_exits_with_its_own_status(end, status):
    code = f"""
        from longspan.training import prefetch
        loop = prefetch(range(10), lambda batch: batch)
        next(loop)
        {end}
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == status, done.stderr
    assert "Exception ignored" not in done.stderr
