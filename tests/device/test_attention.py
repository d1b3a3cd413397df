"""Attention, convolutions and recurrences over ranks on the stand-in device: the bits of the CPU, whenever kernels and
messages run, and no host waits in warm calls."""

import pytest

from tests.device import attention_work as work
from tests.device.ranks import ranks
from tests.lanes import NIGHTLY, share

SCHEDULES = ("plain", "slow messages", "all late") if NIGHTLY else ("all late",)


@pytest.mark.parametrize("form", ["standin", "cuda"])
@pytest.mark.parametrize("world", [2, 4])
def test_extras_have_the_bits_of_the_cpu(world, form):
    names = share(work.EXTRAS, 3 if form == "standin" else 6, f"{form} {world}")
    for compared in ranks(world, form).run(work.same_bits_of_extras, names, work.SCHEMES[world], SCHEDULES):
        assert compared == len(names) * len(work.SCHEMES[world]) * (len(SCHEDULES) + 1)


@pytest.mark.parametrize("world", [2, 4])
def test_random_plans_have_the_bits_of_the_cpu(world):
    seeds = share(range(60), 10)
    ranks(world).run(work.same_bits_of_random_plans, seeds, ("all late",), timeout=300)


@pytest.mark.parametrize("form", ["standin", "cuda"])
def test_groups_of_one_backend_have_the_bits_of_the_cpu(form):
    ranks(2, form).run(work.same_bits_over_one_backend, SCHEDULES)


@pytest.mark.share(2)
@pytest.mark.parametrize("form", ["standin", "cuda"])
def test_devices_that_are_not_the_current_one(form):
    """Two devices in one process, each with its own group, and one device alone; device 0 is current, and not used."""
    names, schemes = (work.EXTRAS, work.SCHEMES[2]) if NIGHTLY else (("plain", "all"), ("ring", "all_to_all"))
    for compared in ranks(2, form).run(work.same_bits_on_other_devices, names, schemes, SCHEDULES):
        assert compared == len(names) * len(schemes) * len(SCHEDULES) * 4
    assert ranks(1, form).run(work.same_bits_on_one_device, work.EXTRAS) == [len(work.EXTRAS)]


@pytest.mark.parametrize("form", ["standin", "cuda"])
def test_a_hundred_new_batches_prepared_in_a_thread_have_the_bits_of_the_cpu(form):
    steps = 100
    for copies, sizes, compared in ranks(2, form).run(
        work.new_batches, steps, work.SCHEMES[2], "all late", timeout=300
    ):
        assert copies == {"thread": 2 * steps}  # one for each direction, and none in the loop
        assert compared == 20
        assert sizes[1] <= 2**20  # small and bounded: plans that are dropped free theirs


@pytest.mark.parametrize("form", ["standin", "cuda"])
def test_prepared_mixers_copy_no_tables_in_their_first_call(form):
    seeds = share(range(39), 3, form)
    for copies, results in ranks(2, form).run(work.prepared_mixers, seeds, "all late", timeout=300):
        assert copies["thread"] > 2 * len(seeds)
        assert copies["loop"] == 0
        assert results == {"same": 2 * len(seeds)}


def test_mixers_that_do_not_wait_for_the_stream_that_prepared_them_are_seen():
    pool = ranks(2)
    for _, results in pool.run(work.prepared_mixers, range(9), "all late", True, timeout=60):
        assert results == {"same": 18}
    try:
        found = pool.run(work.prepared_mixers, range(9), "all late", True, False, timeout=60)
    except Exception:  # numbers that are not there yet may be no rows at all
        found = [({}, {"other": 1})]
    pool.end()  # messages may be under way
    assert sum(results["other"] for _, results in found) > 0


@pytest.mark.parametrize("world", [2, 4])
def test_convolutions_are_those_of_the_cpu(world):
    ranks(world).run(work.convolutions, share(range(40), 5), ("all late",))


@pytest.mark.parametrize("world", [2, 4])
def test_recurrences_have_the_bits_of_the_cpu(world):
    ranks(world).run(work.recurrences, share(range(39), 3), ("all late",), timeout=300)


@pytest.mark.parametrize(("form", "dtype"), [("standin", "float32"), ("cuda", "float32"), ("cuda", "bfloat16")])
def test_warm_calls_do_not_wait_for_the_device(form, dtype):
    names = share(work.EXTRAS, 4, f"{form} {dtype}")
    for found in ranks(2, form).run(work.warm_waits, names, work.SCHEMES[2], dtype):
        assert found == {}


@pytest.mark.parametrize("form", ["standin", "cuda"])
def test_convolutions_and_recurrences_do_not_wait_for_the_device(form):
    for found in ranks(2, form).run(work.waits_of_mixers, share(range(39), 3, form), timeout=300):
        assert found == {}


def test_traffic_of_backward_on_another_thread_is_counted():
    for found in ranks(2).run(work.traffic, work.SCHEMES[2]):
        for scheme, counted, planned in found:
            assert counted == planned > 0, scheme


def test_fused_kernels_by_their_models():
    """float32 takes `efficient`, bfloat16 `varlen`; results are within their roundings of float64."""
    for dtype, operator, limit in (("float32", "efficient", 2e-6), ("bfloat16", "flash", 3e-2)):
        for worst, used in ranks(2, "cuda").run(work.models_agree, dtype, ("plain", "sinks"), work.SCHEMES[2]):
            assert used[operator] > 0
            assert used[f"{operator} backward"] > 0
            assert max(worst.values()) < limit, worst
    for worst in ranks(2, "cuda").run(
        work.named_kernels, ("varlen", "flash", "cudnn", "efficient"), "bfloat16", ("ring",)
    ):
        assert max(worst.values()) < 3e-2, worst
