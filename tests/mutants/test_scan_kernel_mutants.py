"""Mistakes in kernels of recurrences, each of which a short battery of random problems must notice.

A mutant is a function with one piece of its text replaced.
"""

import inspect
import random
import textwrap
from dataclasses import replace
from functools import cached_property

import numpy as np
import torch

from longspan.mixers import scan_kernels, scan_reference
from longspan.mixers.scan_kernels import FlaScan, MambaScan, PackageScan, scan_kernel_named
from longspan.mixers.scan_reference import (
    ChunkedAttention,
    ChunkedDecays,
    ChunkedElements,
    ChunkTable,
    Decays,
    MovedRows,
    Packing,
    ReferenceScan,
    RowMoves,
    Segments,
)
from tests.kernel_models.scan_packages import KERNELS, use_models
from tests.lanes import share
from tests.scan_cases import KINDS, errors, random_states, random_work

IN_TURNS = ".unflatten(1, (-1, groups)).transpose(1, 2)"
MUTANTS = [  # a function, and mistakes in it: what is wrong, the text, what stands there instead
    (ChunkedAttention.local, [
        ("the entering state is lost", "_carry_states(states, step)", "_carry_states(states * 0, step)"),
        ("the gradient of entering states is lost", "_carry_states(states, step)",
         "_carry_states(states.detach(), step)"),
        ("the gradient through leaving states is lost", ".flatten(1, 2), after",
         ".flatten(1, 2), after.detach() + 0 * after"),
        ("uncorrected values are read", "torch.cat(corrected) if corrected else self.v", "self.v"),
        ("D is forgotten", "out + self.skip", "out"),
    ]),
    (ChunkedAttention._delta_step, [
        ("states are not decayed", "_add_product(whole * state,", "_add_product(state,"),
        ("the correction has the wrong sign", "weights, state, -1)", "weights, state)"),
    ]),
    (ChunkedAttention._decay_step, [
        ("states are not decayed without the delta rule", "whole[number], state", "whole[number] ** 0, state"),
    ]),
    (ChunkedAttention._solve, [
        ("beta is outside of the correction", "self.decays.from_start * self.beta", "self.decays.from_start"),
        ("beta is not in the system", "(self.k, self.k) * self.beta", "(self.k, self.k)"),
        ("keys that read are not decayed", "(self.decays.from_start * self.beta)", "self.beta"),
    ]),
    (ChunkedAttention.summary, [
        ("M is transposed", "return m, u", "return m.mT, u"),
        ("M and U are in the wrong order", "u, m = after.split((v, k), -1)", "m, u = after.split((k, v), -1)"),
        ("M begins with nothing", "torch.cat((start, one), -1)", "torch.cat((start, 0 * one), -1)"),
    ]),
    (ChunkedDecays.segment_decays, [
        ("M is that of the last chunk", "state + parts[number]", "parts[number] + 0 * state"),
    ]),
    (Decays.of.__func__, [
        ("the decay comes after the token", ".cumsum(3)", ".cumsum(3).roll(1, 3)"),
        ("decays of -inf make nan", "g.clamp(min=math.log(LEAST[g.dtype]) - 1)", "g"),
    ]),
    (Decays._pairs.func, [
        ("a token does not read itself", "triu(1)", "triu(0)"),
        ("tokens read the next one", "triu(1)", "triu(2)"),
    ]),
    (Decays._halves.func, [
        ("the second half decays like the first", "self.exp(second - border)", "self.exp(border - first)"),
    ]),
    (Decays._multiply_by_halves, [
        ("halves are swapped", "((b, 0), (a, 1))", "((b, 1), (a, 0))"),
    ]),
    (scan_reference._attention, [
        ("the scale is applied twice", "recurrence.scale, l2norm", "recurrence.scale**2, l2norm"),
        ("keys are not normalised", "_scale(k, 1.0, l2norm)", "k"),
    ]),
    (scan_reference._scale, [("nothing is added to the sum of squares", " + EPSILON", "")]),
    (scan_reference._token_folder, [("heads share keys in turns", ".unflatten(1, (groups, -1))", IN_TURNS)]),
    (scan_reference.discretize, [
        ("states decay where a segment has ended", ".masked_fill(ended, 0)", ""),
        ("the bias of dt is forgotten", "dt if bias is None else dt + _of_heads(bias, dt)", "dt"),
        ("dt is not clamped", ".clamp(*recurrence.limits)", ""),
    ]),
    (scan_reference.unfold_output, [("the output is in the wider dtype", "out.to(values.dtype)", "out")]),
    (scan_reference.without_autocast, [
        ("autocast narrows products", "enabled=False", 'enabled=torch.is_autocast_enabled("cpu")'),
    ]),
    (scan_reference._elements, [
        ("channels forget where a segment has ended", "a.masked_fill((table.slot < 0).unsqueeze(-1), 1)", "a"),
    ]),
    (ChunkedElements._scan_chunks, [("a channel's first decay is left out", "decays[0] if", "decays[0] ** 0 if")]),
    (ChunkedElements.local, [("channels of chunks begin with nothing", "* before.unsqueeze(1)", "* 0")]),
    (ChunkedElements.segment_decays, [
        ("M of channels is that of the last chunk", "whole[number] * state", "whole[number]"),
    ]),
    (ChunkTable.carry, [
        ("chunks leave nothing to one another", "step(number, state)", "step(number, 0 * state)"),
        ("what chunks leave has no gradient", "step(number, state)", "step(number, state.detach())"),
        ("states that have left are in the wrong order", "left[::-1]", "left"),
        ("states leave in the order of lengths", "[self.place]", ""),
        ("states enter in the order of segments", "states[self.order]", "states"),
    ]),
    (inspect.unwrap(scan_reference._build_chunk_table), [
        ("chunks overlap by a token", "number * size)[:, None]", "number * size - (number > 0))[:, None]"),
        ("chunks begin a token late", "+ np.arange(size)", "+ np.arange(size) + (number > 0)[:, None]"),
        ("segments are a token longer", "slot < end[segment]", "slot < np.minimum(end + 1, slots)[segment]"),
        ("batch rows are all the first", "slot + row[segment][:, None] * slots", "slot"),
    ]),
    (RowMoves.take, [("blank rows hold the first slot", "if len(self.blank)", "if False")]),
    (MovedRows.backward, [("tokens get no gradients", "apply(gradients[0],", "apply(0 * gradients[0],")]),
    (FlaScan.run, [
        ("packages: entering states are lost", "states.contiguous()", "0 * states"),
        ("packages: heads share keys in turns", "x.repeat_interleave(v.shape[2] // x.shape[2], 2)",
         "x.repeat(1, 1, v.shape[2] // x.shape[2], 1)"),
        ("packages: queries and keys are normalised or not", "= recurrence.l2norm", "= not recurrence.l2norm"),
        ("packages: the scale is theirs", '{"scale": recurrence.scale}', '{"scale": k.shape[-1] ** -0.5}'),
    ]),
    (FlaScan.summary, [
        ("packages: M is transposed", "return m, u", "return m.mT, u"),
        ("packages: values are written into M", "(0, features[0]))", "(0, features[0]), value=1.0)"),
    ]),
    (inspect.unwrap(scan_reference._packing), [
        ("packages: segments are packed by place", "row * slots + first -", "np.sort(row * slots + first) -"),
        ("packages: batch rows are all the first", "row * slots + first -", "first -"),
    ]),
    (Packing.unpack, [("packages: the output is moved on by one", "x.squeeze(0)", "x.squeeze(0).roll(1, 0)")]),
    (MambaScan.summary, [("packages: M is 1", "diagonal_maps(work)", "diagonal_maps(work) ** 0")]),
    (MambaScan.run, [
        ("packages: segments leave in the order of lengths", "[to_device(place, states.device)]", ""),
        ("packages: groups overwrite one another", "out = out + table", "out = table"),
    ]),
    (MambaScan._rows, [
        ("packages: states are not turned", "return out, after.mT", "return out, after.reshape(after.mT.shape)"),
        ("packages: D is forgotten there", "None if d is None else d.contiguous()", "None"),
        ("packages: dt is clamped by them", '(float("-inf"), float("inf"))', "(0.1, 0.2)"),
    ]),
    (scan_kernels.group_by_length, [
        ("packages: the longer ones come apart", "int(lengths[order[i]])", "int(lengths[order[j - 1]])"),
    ]),
]  # fmt: skip
USERS = [
    inspect.getmodule(x)
    for x in (ChunkedAttention, ChunkedElements, ChunkTable, FlaScan, MambaScan, PackageScan, ReferenceScan)
] + [scan_reference]


def mutate(patch, function, old, new):
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(old) == 1, f"{function.__qualname__} has {source.count(old)} times {old!r}"
    made, module = {}, inspect.getmodule(function)
    exec(compile(source.replace(old, new), function.__qualname__, "exec"), module.__dict__, made)
    name, found = function.__name__, made[function.__name__]
    *classes, _ = function.__qualname__.split(".")
    if not classes:
        for user in USERS:  # others have imported it by name
            if inspect.unwrap(getattr(user, name, None)) is function:
                patch.setattr(user, name, found)
        return
    owner = getattr(module, classes[0])
    if isinstance(found, cached_property):
        found.__set_name__(owner, name)
    patch.setattr(owner, name, found)


# -- the battery -------------------------------------------------------------------------------------------------------


def problems():
    """Kernel, problem, states and the largest error: random ones, and some that show what random ones do not."""
    plain, several = (
        scan_kernel_named("reference"),
        Segments(np.array([[0, 30, 32], [1, 0, 70], [0, 3, 24], [1, 71, 72]])),
    )
    for seed, kind in enumerate(KINDS):
        for at, strength in enumerate((0.05, 1.0)):
            torch.manual_seed(seed)
            rng = random.Random(2 * seed + at)
            work = random_work(kind, rng, several, slots=75, batch=2, sizes=(2, 2, 3, 4), strength=strength)
            yield plain, work, random_states(work), 1e-11
    for kind, name in KERNELS.items():
        torch.manual_seed(1)
        work = random_work(kind, random.Random(3), several, torch.float32, 75, 2, (2, 2, 3, 4), strength=0.05)
        yield scan_kernel_named(name), work, random_states(work), 1e-4
    one = Segments(np.array([[0, 0, 70]]))
    forgets = random_work("gla", random.Random(0), one, slots=70, batch=1, strength=0.05)
    g = forgets.tokens[3].clone()
    g[:, 5] = -750.0  # exp is 0; -inf has no derivative by tokens
    yield plain, replace(forgets, tokens=(*forgets.tokens[:3], g)), random_states(forgets), 1e-11
    half = random_work("kda", random.Random(0), one, torch.bfloat16, 70, 1, strength=0.05)
    yield plain, half, random_states(half), 0.1


def first_failure():
    for function in (scan_reference._build_chunk_table, scan_reference._packing, scan_reference._tables):
        function.cache_clear()
    try:
        for at, (kernel, work, states, limit) in enumerate(problems()):
            found = errors(kernel, work, states)
            worst = max(found, key=found.get)
            if not found[worst] <= limit:
                return f"problem {at} ({kernel.name}, {work.recurrence.name}): {worst} {found[worst]:.0e}"
        return special_failure()
    except (AssertionError, RuntimeError, IndexError, ValueError) as error:  # any other is the mutant's mistake
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.90}"


def special_failure():
    """What errors do not show: dtypes, autocast, decays of -inf."""
    plain = scan_kernel_named("reference")
    torch.manual_seed(0)
    work = random_work("linear_attention", random.Random(1), dtype=torch.bfloat16)
    states = random_states(work)
    if plain.local(work, states)[0].dtype != torch.bfloat16:
        return "dtype"
    work = random_work("gla", random.Random(1), dtype=torch.float32)
    states = random_states(work)
    with torch.autocast("cpu", torch.bfloat16):
        cast = plain.local(work, states)[0]
    if not torch.equal(cast, plain.local(work, states)[0]):
        return "autocast"
    tokens = (*work.tokens[:3], torch.full_like(work.tokens[3], -torch.inf))
    return None if plain.local(replace(work, tokens=tokens), states)[0].isfinite().all() else "-inf"


def test_the_battery_passes_without_mutants(monkeypatch):
    use_models(monkeypatch)
    assert first_failure() is None


def test_every_mutant_is_killed(monkeypatch, capsys):
    found, mutants = {}, [(function, *mistake) for function, mistakes in MUTANTS for mistake in mistakes]
    assert len(mutants) >= 50
    for function, name, old, new in share(mutants, 6):
        with monkeypatch.context() as patch:
            use_models(patch)
            mutate(patch, function, old, new)
            found[name] = first_failure()
    with capsys.disabled():
        print()
        for name, failure in found.items():
            print(f"  {name:50s} {failure}")
    survivors = [name for name, failure in found.items() if failure is None]
    assert not survivors, f"{len(survivors)} of {len(found)} mutants live: {survivors}"
    use_models(monkeypatch)
    assert first_failure() is None, "a mutant was not taken back"
