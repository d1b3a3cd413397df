"""Attention, convolutions and recurrences over ranks on the device, beside the same calls on the CPU."""

import contextlib
import threading
from collections import Counter
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist

import longspan as ls
from longspan import masks
from longspan.device_tables import Copied
from longspan.mixers import convolution, scan_reference, scan_run
from longspan.run import tables, walk
from longspan.run.transports import observe
from longspan.scores import RelativeBias
from longspan.training import prefetch
from tests.conv_cases import conv_case
from tests.device import forms
from tests.gloo.gloo_work import make_case
from tests.spread_cases import FORMS, asked, problem

SCHEMES = {2: ("ring", "all_gather", "exchange", "staged", "all_to_all"), 4: ("hybrid(2,ring)", "hybrid(2,exchange)")}
SCANS = [form for form in FORMS if not form.startswith("own")]  # those make CPU tensors themselves
EXTRAS = ("plain", "sinks", "softcap", "alibi", "bias", "relative_bias", "score_mod", "dropout", "mask_function", "all")


def here():
    return forms.device(dist.get_rank())


def extras_case(name, scheme, dtype="float32", seed=0, tokens=96, stripe=None):
    """A plan, whole q, k, v and dout, tensors that take part, and a function from these to the call's options."""
    heads = 4
    mask = masks.documents([30, 21, tokens - 51]) & masks.causal()
    if name in ("mask_function", "all"):
        mask = masks.from_mask_mod(lambda b, h, q, kv: (q - kv) % 3 != 1, tokens, within=mask)
    world = dist.get_world_size()
    layout = ls.layouts.zigzag(tokens, world) if stripe is None else ls.layouts.striped(tokens, world, stripe=stripe)
    plan = ls.plan(mask, layout, q_heads=heads, kv_heads=2, head_dim=16, dtype=dtype, scheme=scheme)
    draw = torch.Generator().manual_seed(seed)
    whole = [torch.randn(1, h, tokens, 16, generator=draw).to(getattr(torch, dtype)) for h in (heads, 2, 2, heads)]
    learned = {
        "sinks": torch.randn(heads, generator=draw),
        "alibi": torch.rand(heads, generator=draw),
        "bias": torch.randn(1, heads, tokens, tokens, generator=draw),
        "relative_bias": torch.randn(8, heads, generator=draw),
        "score_mod": torch.randn(heads, generator=draw),
    }
    wanted = ("sinks", "alibi", "relative_bias", "score_mod") if name == "all" else (name,)
    learned = {key: value for key, value in learned.items() if key in wanted}

    def options(learned):
        found = {key: value for key, value in learned.items() if key in ("sinks", "alibi", "bias")}
        if "relative_bias" in learned:
            found["relative_bias"] = RelativeBias(learned["relative_bias"], False, 32)
        if "score_mod" in learned:
            slopes = learned["score_mod"]
            found["score_mod"] = lambda score, b, h, q, kv: score + slopes[h] * (q - kv) / tokens
        if name in ("softcap", "all"):
            found["softcap"] = 5.0
        if name in ("dropout", "all"):
            found |= {"dropout": 0.3, "seed": 11}
        return found

    return plan, whole, learned, options


def step(case, device, kernel, group=None):
    """This rank's output, lse and all gradients of one call, on the host."""
    plan, whole, learned, options = case
    rank = dist.get_rank()
    *own, dout = (plan.layout.shard(x, rank, 2).to(device) for x in whole)
    own = [x.requires_grad_() for x in own]
    learned = {key: value.to(device).requires_grad_() for key, value in learned.items()}
    group = dist.group.WORLD if group is None else group
    out, lse = ls.attention(*own, plan, group=group, kernel=kernel, return_lse=True, **options(learned))
    gradients = torch.autograd.grad(out, [*own, *learned.values()], dout)
    return [x.detach().cpu() for x in (out, lse, *gradients)]


def random_case(seed):
    """As the tests on Gloo draw them: masks, layouts, schemes, sizes and dtypes of every kind."""
    plan, whole = make_case(seed, dist.get_world_size())
    return plan, whole, {}, lambda learned: {}


def same_bits(build, arguments, schedules, kernel="reference", group=None):
    """Compare calls on the device with the CPU's, on each schedule, cold and warm. Returns how many were compared."""
    compared = 0
    for argument in arguments:
        case = build(*argument)
        expected = step(case, "cpu", kernel)
        for number, schedule in enumerate((*schedules, schedules[-1])):
            with forms.schedule(schedule):
                found = step(case, here(), kernel, group)
            for a, b in zip(found, expected, strict=True):
                off = (a - b).abs().max() if a.numel() else 0
                assert torch.equal(a, b), f"{argument} on {schedule!r}, call {number}: {off} from the CPU's"
            compared += 1
    return compared


def same_bits_of_extras(names, schemes, schedules):
    return same_bits(extras_case, [(name, scheme) for scheme in schemes for name in names], schedules)


def same_bits_of_random_plans(seeds, schedules):
    return same_bits(random_case, [(seed,) for seed in seeds], schedules)


def same_bits_over_one_backend(schedules):
    """A group that serves the device alone: ranks compare their calls through the store."""
    group = dist.new_group(backend=forms.backend(alone=True))
    schemes = SCHEMES[dist.get_world_size()]
    return same_bits(extras_case, [("sinks", scheme) for scheme in schemes], schedules, group=group)


def touched(index):
    """What a device was asked for so far: tasks on its streams, and memory."""
    return forms.native.tasks(index), forms.native.memory(index)[3]


def same_bits_on_other_devices(names, schemes, schedules):
    """Attention over ranks on two devices of each process, neither of which is the current one, each with a group of
    its own, in turns. Returns how many calls were compared; the current device stays as it is, and is not used."""
    rank, world, compared = dist.get_rank(), dist.get_world_size(), 0
    places = [(forms.device(index), dist.new_group(backend=forms.backend(alone=index == 2))) for index in (1, 2)]
    torch.accelerator.set_device_index(0)
    try:
        for device, group in places:  # connections; a barrier is on the current device
            dist.all_reduce(torch.zeros(1, device=device), group=group)
        for scheme in schemes:
            for name in names:
                case = extras_case(name, scheme)
                expected = step(case, "cpu", "reference")
                for schedule in schedules:
                    for device, group in places * 2:  # cold and warm
                        others = [touched(index) for index in range(4) if index != device.index]
                        with forms.schedule(schedule):
                            found = step(case, device, "reference", group)
                        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), (name, scheme)
                        assert torch.accelerator.current_device_index() == 0
                        assert [touched(index) for index in range(4) if index != device.index] == others, (name, scheme)
                        compared += 1
    finally:
        torch.accelerator.set_device_index(rank)
    assert world > 1
    return compared


def same_bits_on_one_device(names):
    """The same without ranks: calls on device 1 while device 0 is current."""
    compared = 0
    for index in (1, 0):  # a device without a number is the current one
        torch.accelerator.set_device_index(index)
        made = ls.block_mask(ls.masks.causal(), ls.layouts.zigzag(64, 2), 0, device=forms.device(0).type)
        assert made.kv_num_blocks.device == forms.device(index)
    for name in names:
        plan, whole, learned, options = extras_case(name, "auto")
        results = []
        for device in ("cpu", forms.device(1)):
            before = touched(0)
            *own, dout = (x.to(device) for x in whole)
            own = [x.requires_grad_() for x in own]
            taken = {key: value.to(device).requires_grad_() for key, value in learned.items()}
            out, lse = ls.attention(*own, plan.mask, kernel="reference", return_lse=True, **options(taken))
            gradients = torch.autograd.grad(out, [*own, *taken.values()], dout)
            results.append([x.detach().cpu() for x in (out, lse, *gradients)])
            assert touched(0) == before, name
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), name
        compared += 1
    return compared


def warm_waits(names, schemes, dtype="float32", kernel="auto"):
    """What the host waited for in warm forward and backward calls, by case; nothing, if all is well."""
    found = {}
    for scheme in schemes:
        for name in names:
            plan, whole, learned, options = extras_case(name, scheme, dtype)
            rank, device = dist.get_rank(), here()
            *own, dout = (plan.layout.shard(x, rank, 2).to(device) for x in whole)
            own = [x.requires_grad_() for x in own]
            learned = {key: value.to(device).requires_grad_() for key, value in learned.items()}
            arguments = options(learned)
            for _ in range(2):
                torch.accelerator.synchronize()
                with forms.HostWaits() as waits:
                    out = ls.attention(*own, plan, group=dist.group.WORLD, kernel=kernel, **arguments)
                    torch.autograd.grad(out, [*own, *learned.values()], dout)
            if waits.all:
                found[name, scheme] = waits.by("/src/longspan/") or waits.all[:1]
    return found


def models_agree(dtype, names, schemes):
    """Fused kernels of the form "cuda", by their models, which `auto` takes: the largest error beside the CPU's own
    `reference` in float64, relative to the largest number, and the operators that ran."""
    from tests.device import models

    models.used.clear()
    worst = Counter()
    for scheme in schemes:
        for name in names:
            plan, whole, learned, options = extras_case(name, scheme, dtype)
            wide = extras_case(name, scheme, "float64")
            wide = wide[0], [x.double() for x in whole], {key: x.double() for key, x in learned.items()}, wide[3]
            expected = step(wide, "cpu", "reference")
            with forms.schedule("late messages"):
                found = step((plan, whole, learned, options), here(), "auto")
            for a, b in zip(found, expected, strict=True):
                finite = b.isfinite()
                assert torch.equal(a.isfinite(), finite), (name, scheme)
                error = (a.double() - b)[finite].abs().max() / b[finite].abs().max().clamp(min=1)
                worst[name] = max(worst[name], float(error))
    return dict(worst), dict(models.used)


def named_kernels(kernels, dtype, schemes):
    """The largest relative error of kernels by name."""
    worst = {}
    for kernel in kernels:
        for scheme in schemes:
            plan, whole, learned, options = extras_case("plain", scheme, dtype)
            wide = extras_case("plain", scheme, "float64")[0], [x.double() for x in whole], {}, options
            expected = step(wide, "cpu", "reference")
            found = step((plan, whole, learned, options), here(), kernel)
            errors = [float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True)]
            worst[kernel] = max(worst.get(kernel, 0.0), *errors)
    return worst


def traffic(schemes):
    """Bytes that were counted in forward and backward, which runs on another thread; and what plans say."""
    found = []
    for scheme in schemes:
        case = extras_case("plain", scheme)
        plan, rank = case[0], dist.get_rank()
        with observe() as counted:
            step(case, here(), "reference")
        steps = [s for way in ("forward", "backward") for s in plan.steps(rank, way)]
        planned = sum(t.piece.num_bytes(plan.sizes) for s in steps for t in s.transfers if t.src == rank)
        found.append((scheme, counted.sent_bytes(rank), planned))
    return found


# ---- convolutions and recurrences ------------------------------------------------------------------------------------


def convolutions(seeds, schedules):
    rank, compared = dist.get_rank(), 0
    for seed in seeds:
        case = conv_case(seed, dist.get_world_size(), torch.float32)
        x, weight, bias, dout = case.tensors
        results = []
        for place in ("cpu", *schedules):
            device = "cpu" if place == "cpu" else here()
            own = [case.layout.shard(x, rank, 1), weight, bias]
            own = [None if t is None else t.detach().to(device).requires_grad_() for t in own]
            with forms.schedule("plain" if place == "cpu" else place):
                out = ls.causal_conv1d(*own, plan=case.plan, group=dist.group.WORLD, activation=case.activation)
                leaves = [t for t in own if t is not None]
                gradients = torch.autograd.grad(out, leaves, case.layout.shard(dout, rank, 1).to(device))
                results.append([t.detach().cpu() for t in (out, *gradients)])
        for found in results[1:]:
            for a, b in zip(found, results[0], strict=True):  # CPUs have a quicker way of their own
                assert torch.allclose(a, b, rtol=1e-5, atol=4e-6), f"{seed}: {case}, off by {(a - b).abs().max()}"
            compared += 1
    return compared


def recurrences(seeds, schedules):
    rank, compared = dist.get_rank(), 0
    for seed in seeds:
        p = problem(seed, world=dist.get_world_size(), form=SCANS[seed % len(SCANS)])
        plan, results = p.plan(), []
        for place in ("cpu", *schedules):
            device = "cpu" if place == "cpu" else here()
            tokens = {name: p.layout.shard(t, rank, 1) for name, t in p.tokens.items()} | p.shared
            own = {name: t.detach().clone().to(device).requires_grad_() for name, t in tokens.items()}
            with forms.schedule("plain" if place == "cpu" else place):
                out = asked(p, own, plan=plan, group=dist.group.WORLD)
                dout = p.layout.shard(p.dout, rank, 1).to(device)
                gradients = torch.autograd.grad(out, list(own.values()), dout, allow_unused=True)
                results.append([None if t is None else t.detach().cpu() for t in (out, *gradients)])
        for found in results[1:]:
            for a, b in zip(found, results[0], strict=True):
                assert (a is None and b is None) or torch.equal(a, b), f"{seed}: {p}, differs by {(a - b).abs().max()}"
            compared += 1
    return compared


def waits_of_mixers(seeds):
    """What the host waited for in first and warm calls of convolutions and recurrences, by case."""
    rank, device, group, found = dist.get_rank(), here(), dist.group.WORLD, {}

    def note(case, call, leaves, dout):
        for number in range(2):
            torch.accelerator.synchronize()
            with forms.HostWaits() as waits:
                torch.autograd.grad(call(), leaves, dout, allow_unused=True)
            if waits.all:
                found[case, number] = waits.by("/src/longspan/") or waits.all[:1]

    for seed in seeds:
        case = conv_case(seed, dist.get_world_size(), torch.float32)
        x, weight, bias, dout = case.tensors
        own = [case.layout.shard(x, rank, 1), weight, bias]
        own = [None if t is None else t.detach().to(device).requires_grad_() for t in own]
        options = {"plan": case.plan, "group": group, "activation": case.activation}
        leaves = [t for t in own if t is not None]
        dout = case.layout.shard(dout, rank, 1).to(device)
        note(f"convolution {seed}", partial(ls.causal_conv1d, *own, **options), leaves, dout)
        p = problem(seed, world=dist.get_world_size(), form=SCANS[seed % len(SCANS)])
        tokens = {name: p.layout.shard(t, rank, 1) for name, t in p.tokens.items()} | p.shared
        own = {name: t.detach().clone().to(device).requires_grad_() for name, t in tokens.items()}
        dout = p.layout.shard(p.dout, rank, 1).to(device)
        note(f"{p} {seed}", partial(asked, p, own, plan=p.plan(), group=group), list(own.values()), dout)
    return found


def prepared_mixers(seeds, schedule, at_once=False, waits=True):
    """Convolutions and recurrences of plans that a thread prepared, on its own stream for every other seed. Returns
    copies of tables by thread, and how many results were those of plans that were not prepared, and how many not.
    With `at_once`, plans are prepared right before the call, on another stream, for which the call `waits` or not."""
    rank, device, group, results = dist.get_rank(), here(), dist.group.WORLD, Counter()
    copies, originals, module_of_form = Counter(), {}, torch.get_device_module(forms.form)

    def counted(copy, *arguments):
        copies["thread" if "prefetch" in threading.current_thread().name else "loop"] += 1
        return copy(*arguments)

    def cases(seed):
        case = conv_case(seed, dist.get_world_size(), torch.float32)
        x, weight, bias, dout = case.tensors
        own = [case.layout.shard(x, rank, 1), weight, bias]
        own = [None if t is None else t.detach().to(device).requires_grad_() for t in own]
        call = partial(ls.causal_conv1d, *own, plan=case.plan, group=group, activation=case.activation)
        yield case.plan, call, [t for t in own if t is not None], case.layout.shard(dout, rank, 1).to(device)
        p = problem(seed, world=dist.get_world_size(), form=SCANS[seed % len(SCANS)])
        tokens = {name: p.layout.shard(t, rank, 1) for name, t in p.tokens.items()} | p.shared
        own = {name: t.detach().clone().to(device).requires_grad_() for name, t in tokens.items()}
        plan = p.plan()
        call = partial(asked, p, own, plan=plan, group=group)
        yield plan, call, list(own.values()), p.layout.shard(p.dout, rank, 1).to(device)

    def prepare(seed):
        made = list(cases(seed))
        if not at_once:
            with module_of_form.stream(module_of_form.Stream()) if seed % 2 else contextlib.nullcontext():
                for plan, *_ in made:
                    plan.prepare(rank, device)
        return made

    def run(call, leaves, dout):
        out = call()
        gradients = torch.autograd.grad(out, leaves, dout, allow_unused=True)
        return [None if t is None else t.detach().cpu() for t in (out, *gradients)]

    torch.accelerator.set_device_index(device.index)
    for module, name in (
        (tables, "copy_to_device"), (convolution, "to_device"), (scan_run, "to_device"), (scan_reference, "to_device")
    ):  # fmt: skip
        originals[module, name] = getattr(module, name)
        setattr(module, name, partial(counted, originals[module, name]))
    if not waits:
        originals[Copied, "use"] = Copied.use
        Copied.use = lambda *_: False
    try:
        for made in prefetch(seeds, prepare):
            for plan, *call in made:
                with forms.schedule(schedule):
                    if at_once:
                        with module_of_form.stream(module_of_form.Stream()):
                            plan.prepare(rank, device)
                    found = run(*call)
                seen = Counter(copies)
                for known in (plan, getattr(plan, "halo", plan)):
                    walk._built.pop(known, None)
                expected = run(*call)
                copies.clear()
                copies.update(seen)
                same = all((a is None and b is None) or torch.equal(a, b) for a, b in zip(found, expected, strict=True))
                results["same" if same else "other"] += 1
    finally:
        for (module, name), original in originals.items():
            setattr(module, name, original)
    return copies, results


def new_batches(steps, schemes, schedule, compare=5):
    """New documents in every step, planned and prepared in a thread. Returns copies of tables by thread, the bytes of
    tables after a third of the steps and after all, and how many steps were compared with the CPU's bits."""
    tokens, rank, device = 96, dist.get_rank(), here()
    copies, copy = Counter(), tables.copy_to_device

    def counted(*arguments):
        copies["thread" if "prefetch" in threading.current_thread().name else "loop"] += 1
        return copy(*arguments)

    def prepare(number):
        draw = torch.Generator().manual_seed(number)
        edges = torch.randperm(tokens - 1, generator=draw)[:4].add(1).sort().values.tolist()
        mask = masks.documents([b - a for a, b in pairwise([0, *edges, tokens])]) & masks.causal()
        layout = ls.layouts.balanced(mask, world_size=dist.get_world_size(), seq_len=tokens)
        scheme = schemes[number % len(schemes)]
        plan = ls.plan(mask, layout, q_heads=4, kv_heads=2, head_dim=16, dtype="float32", scheme=scheme)
        plan.prepare(rank, device, kernel="reference")
        whole = [torch.randn(1, h, tokens, 16, generator=draw) for h in (4, 2, 2, 4)]
        return number, (plan, whole, {}, lambda learned: {})

    compared, sizes = 0, []
    tables.copy_to_device = counted
    torch.accelerator.set_device_index(device.index)
    try:
        for number, case in prefetch(range(steps), prepare):
            with forms.schedule(schedule):
                found = step(case, device, "reference")
            if number % compare == 0:
                expected = step(case, "cpu", "reference")
                assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), number
                compared += 1
            if number in (steps // 3, steps - 1):
                sizes.append(tables.CACHE.num_bytes(device))
    finally:
        tables.copy_to_device = copy
    return copies, sizes, compared
