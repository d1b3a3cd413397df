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
from longspan.run import walk
from longspan.run.group import PREFETCHING
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


def test_a_mask_function_whose_data_changed_is_recorded_again():
    table = torch.ones(40, dtype=torch.bool)
    mask = ls.masks.from_mask_mod(lambda b, h, q, k: (q >= k) & table[k], seq_len=40)
    plan = ls.plan(mask, ls.layouts.contiguous(40, 1), **SIZES)
    plan.prepare(0)
    table[10:20] = False
    found = _call(plan)
    expected = _call(ls.masks.from_mask_mod(lambda b, h, q, k: (q >= k) & table[k], seq_len=40))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


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


def test_a_forked_process_records_though_a_thread_of_its_parent_does():
    held = threading.Event()
    done = threading.Event()

    def hold():
        with walk._recording:
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
    assert not PREFETCHING
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
    assert not PREFETCHING


def test_leaving_the_loop_ends_the_thread():
    num_threads = threading.active_count()
    for batch in prefetch(range(100), lambda batch: batch):
        if batch == 3:
            break
    del batch
    assert threading.active_count() == num_threads
    assert not PREFETCHING


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
