"""What the tests of the device itself run, in a process that has it."""

import threading
import time

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.device import forms

SLOW = "slow kernels"


def _device_module():
    return torch.get_device_module(forms.form)


def _counted():
    """Host waits by operator since the last reset."""
    return dict(forms.native.waits())


def kernels_run_later_and_in_order():
    device = forms.device()
    with forms.schedule("late kernels"):
        x = torch.zeros(4, device=device)
        for factor in range(1, 6):
            x.mul_(2).add_(factor)
        stream = torch.accelerator.current_stream()
        assert not stream.query()
        assert x.tolist() == [57.0] * 4
        assert stream.query()


def results_are_those_of_the_cpu():
    """Operators with and without shape functions, views, in-place forms, lists, random strides."""
    device = forms.device()
    x, w = torch.randn(6, 8), torch.randn(8, 5)
    index, chosen = torch.tensor([4, 0, 4]), torch.rand(6) > 0.4
    functions = [
        lambda x, w, index, chosen: x @ w,
        lambda x, w, index, chosen: (x.t()[2:, ::2] * 3).softmax(0),
        lambda x, w, index, chosen: x[index].cumsum(0),
        lambda x, w, index, chosen: x[chosen],
        lambda x, w, index, chosen: torch.cat(x.split([1, 2, 3])[::-1]),
        lambda x, w, index, chosen: x.view(torch.int32)[:, 1:].contiguous(),
        lambda x, w, index, chosen: torch.nn.functional.layer_norm(x, (8,)),
        lambda x, w, index, chosen: torch.nn.functional.cross_entropy(x, x.argmax(1)),
        lambda x, w, index, chosen: x.clone().index_add_(0, index, x[:3]),
        lambda x, w, index, chosen: torch.where(chosen[:, None], x, 0.0),
        lambda x, w, index, chosen: torch.sort(x, 1).values,
        lambda x, w, index, chosen: torch.stack(torch._foreach_mul([x, x + 1], 2.0)),
        lambda x, w, index, chosen: torch.nonzero(chosen),
        lambda x, w, index, chosen: torch.einsum("ab,bc->ca", x, w),
        lambda x, w, index, chosen: torch.conv1d(x[None], x[:, None, :3], groups=6),
        lambda x, w, index, chosen: torch.fft.rfft(x).abs(),
    ]
    inputs = x, w, index, chosen
    for number, function in enumerate(functions):
        expected, got = function(*inputs), function(*(t.to(device) for t in inputs))
        assert got.device == device, number
        assert torch.equal(got.cpu(), expected), number


def streams_run_apart_unless_an_event_orders_them():
    """The same program without and with the wait; on the late schedule the first always reads too early."""
    module, device = _device_module(), forms.device()

    def other_stream_reads(value, waits):
        with forms.schedule("late kernels"):
            side = module.Stream()
            x = torch.zeros(8, device=device)
            x.add_(value)
            if waits:
                side.wait_event(torch.accelerator.current_stream().record_event())
            with module.stream(side):
                y = x.clone()
                side.synchronize()
                return y.tolist()

    assert other_stream_reads(1.0, waits=True) == [1.0] * 8
    assert other_stream_reads(2.0, waits=False) != [2.0] * 8


def events_measure_and_can_be_polled():
    module = _device_module()
    first, second = module.Event(enable_timing=True), module.Event(enable_timing=True)
    with forms.schedule("late kernels"):
        first.record()
        torch.ones(3, device=forms.device())
        second.record()
        assert not second.query()
        second.synchronize()
        assert second.query()
    assert first.elapsed_time(second) >= 0


def memory_is_nan_and_taken_again_at_once():
    device, module = forms.device(), _device_module()
    assert torch.empty(1000, device=device).isnan().all()
    before = module.memory_allocated()
    x = torch.ones(3000, device=device)
    assert module.memory_allocated() - before == 12288  # 12,000 bytes in steps of 512
    address = x.data_ptr()
    del x
    assert module.memory_allocated() == before
    y = torch.empty(3000, device=device)
    assert y.data_ptr() == address
    assert y.isnan().all()


def early_reuse_shows_unless_the_stream_was_recorded():
    """A side stream reads a tensor that its owner frees and whose memory the owner's stream takes again."""
    module, device = _device_module(), forms.device()

    def side_reads(records):
        with forms.schedule("late kernels"):
            side = module.Stream()
            x = torch.ones(5000, device=device)
            side.wait_stream(torch.accelerator.current_stream())
            with module.stream(side):
                y = x + 1
            if records:
                x.record_stream(side)
            del x
            z = torch.zeros(5000, device=device)
            z.sum().item()  # the owner's stream runs first
            side.synchronize()
            return y.cpu().eq(2).all().item()

    assert side_reads(True)
    assert not side_reads(False)


def pinned_copies_are_late():
    device = forms.device()
    assert torch.ones(4).pin_memory().is_pinned()
    assert not torch.ones(4).is_pinned()
    with forms.schedule("late kernels"):
        host, x = torch.zeros(4).pin_memory(), torch.full((4,), 7.0, device=device)
        host.copy_(x, non_blocking=True)
        assert host.tolist() == [0.0] * 4
        torch.accelerator.synchronize()
        assert host.tolist() == [7.0] * 4
        source = torch.ones(4).pin_memory()
        x = source.to(device, non_blocking=True)
        source.fill_(5)  # too early
        assert x.tolist() == [5.0] * 4
        pageable = torch.ones(4)
        x = pageable.to(device, non_blocking=True)
        pageable.fill_(5)
        assert x.tolist() == [1.0] * 4
        x = torch.ones(4).pin_memory().to(device, non_blocking=True)  # freed while it is copied: held until then
        assert x.tolist() == [1.0] * 4


def mixed_devices_are_refused():
    zero, one, host = torch.ones(3, device=forms.device(0)), torch.ones(3, device=forms.device(1)), torch.ones(3)
    scalar = torch.tensor(2.0)
    assert (zero * scalar).tolist() == [2.0] * 3
    assert zero[torch.tensor([1])].tolist() == [1.0]
    attempts = [
        lambda other: zero + other,
        lambda other: zero.add_(other),
        lambda other: torch.cat([zero, other]),
        lambda other: torch.stack([zero, other]),
        lambda other: zero @ other,
        lambda other: torch.where(zero > 0, zero, other),
        lambda other: zero.index_select(0, other.long()),
        lambda other: zero.index_add_(0, torch.zeros(3, dtype=torch.long, device=zero.device), other),
        lambda other: torch.nn.functional.linear(zero, other[None]),
        lambda other: torch.equal(zero, other),
        lambda other: torch._foreach_add([zero], [other]),
    ]
    for attempt in attempts:
        for other in (one, host):
            with pytest.raises(RuntimeError, match=r"same device|on device|on cpu"):
                attempt(other)


def host_waits_are_counted_and_can_be_forbidden():
    device, module = forms.device(), _device_module()
    x = torch.ones(4, device=device)
    acts = {
        "aten::item": lambda: x.sum().item(),
        "aten::nonzero": lambda: x.nonzero(),
        "aten::masked_select": lambda: x.masked_select(x > 0),
        "aten::equal": lambda: torch.equal(x, x),
        "copy to the host": lambda: x.cpu(),
        "copy from pageable memory": lambda: torch.ones(4).to(device),
        "copy from pinned memory": lambda: torch.ones(4).pin_memory().to(device),
        "synchronize a stream": lambda: torch.accelerator.current_stream().synchronize(),
    }
    for name, act in acts.items():
        forms.native.reset_waits()
        act()
        assert _counted() == {name: 1}, (name, _counted())
        module.set_sync_debug_mode("error")
        with pytest.raises(RuntimeError, match="synchronizing"):
            act()
        module.set_sync_debug_mode("default")
    module.set_sync_debug_mode("error")
    forms.native.reset_waits()
    y = torch.where(x > 0, x * torch.tensor(2.0), 1.0).softmax(0).sum() + torch.zeros((), device=device)
    torch.ones(4).pin_memory().to(device, non_blocking=True)
    torch.empty(4).pin_memory().copy_(x, non_blocking=True)
    assert _counted() == {}, _counted()
    torch.accelerator.synchronize()  # asked for in so many words: counted, and allowed
    module.set_sync_debug_mode("default")
    assert _counted() == {"synchronize": 1}
    with forms.HostWaits() as waits:
        y.item()
    ((reason, frames),) = waits.all
    assert reason == "aten::item"
    assert "device_work.py" in frames[0]


def autograd_runs_on_another_thread():
    device, threads = forms.device(), []

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, gradient):
            threads.append(threading.get_ident())
            return gradient * 2

    x = torch.ones(3, device=device, requires_grad=True)
    Note.apply(x).sum().backward()
    assert x.grad.tolist() == [2.0] * 3
    assert threads[0] != threading.get_ident()


def backward_uses_the_streams_of_forward():
    module, device = _device_module(), forms.device()
    seen = []
    with forms.schedule("late kernels"):
        x = torch.ones(3, device=device, requires_grad=True)
        side = module.Stream()
        side.wait_stream(torch.accelerator.current_stream())
        with module.stream(side):
            y = x * 3
            y.register_hook(lambda gradient: seen.append(torch.accelerator.current_stream().stream_id))
        torch.accelerator.current_stream().wait_stream(side)
        y.sum().backward()
        assert x.grad.tolist() == [3.0] * 3
    assert seen == [side.stream_id]


def random_numbers_do_not_depend_on_when_kernels_run():
    device, module = forms.device(), _device_module()

    def drawn(schedule):
        torch.manual_seed(7)
        with forms.schedule(schedule):
            a = torch.rand(50, device=device)
            torch.rand(9)  # the host draws meanwhile
            b = torch.nn.functional.dropout(torch.ones(50, device=device), 0.3)
            c = torch.randn(50, device=device)
            d = torch.randperm(50, device=device)
            return [t.tolist() for t in (a, b, c, d)]

    assert drawn("plain") == drawn("late kernels")
    first, second = torch.rand(5, device=device).tolist(), torch.rand(5, device=device).tolist()
    assert first != second
    state = module.get_rng_state()
    again = torch.rand(5, device=device).tolist()
    module.set_rng_state(state)
    assert torch.rand(5, device=device).tolist() == again
    generator = torch.Generator(device=device).manual_seed(3)
    own = torch.rand(5, device=device, generator=generator).tolist()
    assert own == torch.rand(5, device=device, generator=generator.manual_seed(3)).tolist()


def checkpoints_draw_the_same_numbers_again():
    device = forms.device()
    for reentrant in (False, True):
        x = torch.ones(40, device=device, requires_grad=True)
        y = checkpoint(lambda x: torch.nn.functional.dropout(x, 0.5) ** 2, x, use_reentrant=reentrant)
        kept = y.detach() > 0
        y.sum().backward()
        assert torch.equal(x.grad > 0, kept)


def autocast_casts():
    device = forms.device()
    x, w = torch.randn(4, 4, device=device), torch.randn(4, 4, device=device)
    with torch.autocast(forms.form, torch.bfloat16):
        y = torch.nn.functional.linear(x, w)
        assert y.dtype == torch.bfloat16
        assert y.softmax(0).dtype == torch.float32
        assert torch.nn.functional.layer_norm(y, (4,)).dtype == torch.float32
        with torch.autocast(forms.form, enabled=False):
            assert (x @ w).dtype == torch.float32
    assert torch.equal(y, torch.nn.functional.linear(x.bfloat16(), w.bfloat16()))


def errors_of_kernels_come_later():
    device = forms.device()
    with forms.schedule("late kernels"):
        y = torch.ones(3, device=device)[torch.tensor([5], device=device)]  # the host does not look at indices
        for _ in range(2):  # and every wait says so
            with pytest.raises(RuntimeError, match="launched earlier"):
                y.cpu()
        forms.native.drain(True)
    assert torch.ones(3, device=device).sum().item() == 3


def two_devices_in_one_process():
    zero, one, module = forms.device(0), forms.device(1), _device_module()
    with forms.schedule("all late"):
        x = torch.arange(6.0, device=zero)
        y = x.mul(2).to(one)  # waits for the other device's stream, and the host does not
        x.zero_()
        z = (y + 1).to(zero, non_blocking=True)
        assert z.tolist() == [1.0, 3.0, 5.0, 7.0, 9.0, 11.0]
        with module.device(1):
            assert torch.empty(1, device=forms.form).device == one
            assert torch.accelerator.current_stream().device == one
        assert torch.empty(1, device=forms.form).device == zero
    w = torch.ones(3, device=one, requires_grad=True)
    (w.to(zero) * 2).sum().backward()
    assert w.grad.device == one
    assert w.grad.tolist() == [2.0] * 3


def no_python_kernel_deadlocks():
    """Kernels that are Python functions need the GIL, also while the host waits for them holding it."""
    device, done = forms.device(), []

    def kernel():
        time.sleep(0.01)
        done.append(threading.get_ident())

    x = torch.ones(2, device=device)
    forms.native.launch(0, kernel)
    assert x.sum().item() == 2
    assert done[0] != threading.get_ident()
