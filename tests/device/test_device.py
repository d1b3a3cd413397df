"""The stand-in device itself: that it has a GPU's rules, and that breaking one of them shows."""

import fcntl
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.device import build, device_work, group_work
from tests.device.ranks import ROOT, ranks

WORK = [
    device_work.kernels_run_later_and_in_order,
    device_work.results_are_those_of_the_cpu,
    device_work.streams_run_apart_unless_an_event_orders_them,
    device_work.events_measure_and_can_be_polled,
    device_work.memory_is_nan_and_taken_again_at_once,
    device_work.early_reuse_shows_unless_the_stream_was_recorded,
    device_work.pinned_copies_are_late,
    device_work.mixed_devices_are_refused,
    device_work.host_waits_are_counted_and_can_be_forbidden,
    device_work.autograd_runs_on_another_thread,
    device_work.backward_uses_the_streams_of_forward,
    device_work.random_numbers_do_not_depend_on_when_kernels_run,
    device_work.checkpoints_draw_the_same_numbers_again,
    device_work.autocast_casts,
    device_work.errors_of_kernels_come_later,
    device_work.two_devices_in_one_process,
    device_work.no_python_kernel_deadlocks,
]


@pytest.mark.parametrize("form", ["standin", "cuda"])
@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
def test_device(work, form):
    ranks(1, form).run(work)


@pytest.mark.share(2)
@pytest.mark.parametrize("form", ["standin", "cuda"])
@pytest.mark.parametrize("schedule", ["plain", "slow messages", "all late"])
def test_collectives(form, schedule):
    ranks(2, form).run(group_work.collectives_are_right, schedule)


@pytest.mark.parametrize("schedule", ["slow messages", "late messages"])
def test_batches(schedule):
    for with_wait, without in ranks(2).run(group_work.batches_are_right_and_wait_orders_streams, schedule):
        assert with_wait
        assert not without


def test_groups_of_one_backend():
    for form in ("standin", "cuda"):
        ranks(2, form).run(group_work.groups_of_one_backend)


def test_abort_ends_what_is_under_way():
    ranks(2).run(group_work.abort_ends_what_is_under_way)


def test_first_operation_waits_for_all():
    ranks(4).run(group_work.first_operation_waits_for_all)


def test_the_default_backend_is_that_of_the_device_alone():
    """As docs/gpu.md says of torch 2.13."""
    assert ranks(1, "cuda").run(group_work.default_backends) == ["cuda:nccl"]


HOLD = """
import sys, time
from tests.device import build
build._compile = lambda target: (print("building", flush=True), time.sleep(600))
build._fingerprint = lambda: "killed"
build.build()
"""


def test_a_killed_build_leaves_no_lock():
    if why := build.missing_tool():
        pytest.skip(why)
    folder = build.build().parent
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout.readline() == b"building\n"
        with open(folder / "lock") as lock:
            with pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            holder.send_signal(signal.SIGKILL)
            holder.wait(10)
            time.sleep(0.1)
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        holder.kill()
        holder.stdout.close()
        holder.wait(10)


def test_without_a_compiler_it_says_so(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert "g++" in build.missing_tool()
