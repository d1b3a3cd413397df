"""A case or two of every layer that runs tensors, for `pytest -m quick`.

Each test runs a few cases of a larger one. Torch is imported inside, so that quick tests of the planning layers, which
do not need it, start at once.
"""

import pytest

pytestmark = [pytest.mark.quick, pytest.mark.timeout(120)]


def test_attention_on_one_device_and_in_loopback():
    from tests.unit import test_simulated

    test_simulated.test_operators_of_simulated_ranks_are_those_of_one_device(1)


def test_strided_inputs_of_a_kernel():
    from tests.unit import test_kernels

    test_kernels.test_strided_views("cpu_flash", None)


def test_recurrences():
    from tests.unit.test_scans import checked, problem

    for seed in range(4):
        checked(problem(seed), problem(seed).plan())


def test_convolution():
    from tests.conv_cases import conv_case, expected, run_conv_loopback, worst

    for seed in range(4):
        case = conv_case(seed)
        found = run_conv_loopback(case.plan, *case.tensors, activation=case.activation)
        assert max(worst(found, expected(case))) <= 1e-12


def test_losses_without_logits():
    from tests.head_cases import check

    for seed in range(4):
        error, name = check(seed)
        assert error <= 1e-12, name


def test_verify_finds_a_planted_fault_and_passes_its_twin():
    from tests.unit import test_prove_model

    test_prove_model.test_a_right_model_is_right_and_not_touched()
    test_prove_model.test_faults_are_found_and_named(next(iter(test_prove_model.FAULTS)), test_prove_model.LAYOUTS[0])


def test_attention_on_two_gloo_ranks():
    from tests.gloo import gloo_work
    from tests.pool import end_all, pool

    try:
        for results in pool(2).run(gloo_work.run_cases, [2000, 2001, 2002], 2):
            for seed, _, case, errors in results:
                assert all(error <= allowed for error, allowed in errors), (seed, case, errors)
    finally:
        end_all()
