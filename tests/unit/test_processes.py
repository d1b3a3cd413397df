"""Looking at processes, the store's client in plain Python, and what strangers write."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from longspan.errors import RankError
from longspan.watch.detector import pack_process, parse_heartbeat, parse_process
from longspan.watch.processes import GONE, STOPPED, Process, current_process, find_listener, inspect_process
from longspan.watch.store_client import LostError, StoreClient


def until(process, state):
    end = time.monotonic() + 20
    while inspect_process(process).state != state and time.monotonic() < end:
        time.sleep(0.02)
    return inspect_process(process).state


def until_every_thread_stands(pid):
    """A stop reaches each thread on its own: until then the thread that serves the store may answer once more."""
    states = "R"
    end = time.monotonic() + 20
    while set(states) != {STOPPED} and time.monotonic() < end:
        time.sleep(0.01)
        files = Path(f"/proc/{pid}/task").glob("*/stat")
        states = [file.read_text().rpartition(")")[2].split()[0] for file in files]
    assert set(states) == {STOPPED}, states


def test_a_process_is_seen_to_run_stop_go_on_and_end():
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])
    try:
        start = int(Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19])
        process = Process(current_process().host, child.pid, start)
        assert inspect_process(process).state not in (GONE, STOPPED)
        child.send_signal(signal.SIGSTOP)
        assert until(process, STOPPED) == STOPPED
        child.send_signal(signal.SIGCONT)
        assert until(process, "S") == "S"
        assert inspect_process(process._replace(start=start + 1)).state == GONE  # its number was another one's before
        child.kill()
        assert until(process, GONE) == GONE  # a zombie, since nobody has waited for it
    finally:
        child.kill()
        child.wait()
    assert inspect_process(process).state == GONE


def test_current_process_is_itself():
    me = current_process()
    assert me == current_process()
    assert me.pid == os.getpid()
    assert inspect_process(me).seconds > 0


@pytest.mark.parametrize("libuv", [True, False])
def test_the_client_speaks_with_pytorchs_store(libuv):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=libuv)
    client = StoreClient(("127.0.0.1", store.port), "part", 20.0)
    store.set("part/a", b"\0\xff" * 300)
    assert client.get("a") == b"\0\xff" * 300
    assert client.get("b") is None
    client.set("b", b"")
    client.set("c", b"x" * 70_000)
    assert store.get("part/c") == client.get("c") == b"x" * 70_000
    assert client.get("b") == b""
    assert (client.add("n", 5), client.add("n", -2), store.add("part/n", 1)) == (5, 3, 4)
    assert (client.claim("f", b"mine\0"), client.claim("f", b"other")) == (b"mine\0", b"mine\0")
    deep = client.part("deep")
    assert deep.get("a") is None
    deep.close()
    assert client.is_local
    assert find_listener(store.port) == current_process()
    client.close()
    with pytest.raises(LostError):
        client.get("a")


def test_a_store_that_is_gone_or_silent_is_noticed():
    script = (
        "import time, torch.distributed as d\n"
        "s = d.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)\n"
        "print(s.port, flush=True)\ntime.sleep(100)"
    )
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        address = ("127.0.0.1", int(child.stdout.readline()))
        client = StoreClient(address, "p", 1.0)
        try:
            assert client.get("a") is None
            child.send_signal(signal.SIGSTOP)
            until_every_thread_stands(child.pid)
            with pytest.raises(LostError, match="no answer within"):
                client.get("a")
        finally:
            client.close()
        child.send_signal(signal.SIGCONT)
        again = StoreClient(address, "p", 20.0)
        assert again.get("a") is None  # it was only slow
        child.kill()
        child.wait()
        with pytest.raises(LostError):
            again.get("a")
        again.close()
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


@given(st.binary(max_size=60))
def test_whatever_a_stranger_writes_is_refused(raw):
    for parse in (parse_process, parse_heartbeat):
        with pytest.raises(RankError, match=r"not a (process|heartbeat) of Longspan"):
            parse(raw)


def test_processes_that_cannot_be_are_refused():
    with pytest.raises(RankError, match="not a process"):
        parse_process(pack_process(Process(bytes(16), 0, 1)))
