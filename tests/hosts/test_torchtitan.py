"""torchtitan 0.3.0 on CPUs and Gloo through its own command line: with Longspan on any number of ranks, training is
what torchtitan computes on one with masks written out pair by pair. It runs in processes of its own (titan_work.py),
because it changes torch where it is imported."""

import doctest
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from longspan.masks import causal, documents, sliding_window
from longspan.torchtitan import masks as titan_masks
from longspan.torchtitan.masks import BALANCERS, layout_of

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed"),
]

ROOT = Path(__file__).resolve().parents[2]
LIMIT = 800.0  # seconds for the processes of one run; quiet cores need a twentieth
OVERRIDES = ("tokenizer", "recorder", "linears", "embeddings")
OURS = "longspan.torchtitan", "llama3_debugmodel"
STOCK = ["--parallelism.spmd_backend", "partial_dtensor", "--training.disable_cuda_graphs"]
CP = ["--parallelism.context_parallel_degree", "2"]


def job(module, config, *options, steps=10, rows=4, documents="", overrides=(), dtype="float32"):
    """Arguments for torchtitan: no clipping, our data. `rows` is the batch of one data-parallel rank."""
    names = [f"tests.hosts.titan_work.{name}" for name in (*OVERRIDES, *overrides)]
    sizes = {"steps": steps, "seq_len": 64, "local_batch_size": rows, "max_norm": 1e9}
    return [
        "--module", module, "--config", config, "--training.mixed_precision_param", dtype,
        *(text for name, size in sizes.items() for text in (f"--training.{name}", str(size))),
        "--debug.no-enable_structured_logging", *options,
        "--override.imports", f"tests.hosts.titan_work.documents{documents}", *names,
    ]  # fmt: skip


_failures = {}


def once(function):
    """The function, run once, also if it fails: the next test would wait as long for the same failure."""
    kept = lru_cache(function)

    def get():
        if function in _failures:
            pytest.fail(f"{function.__name__} failed before: {_failures[function]}")
        try:
            return kept()
        except Exception as error:
            _failures[function] = str(error)[-300:]
            raise

    return get


def train(world, *jobs):
    """What every job recorded, on `world` processes that run the jobs one after another."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "results")
        texts = [job if isinstance(job, str) else json.dumps([*job, "--dump_folder", folder]) for job in jobs]
        env = dict(
            os.environ, WORLD_SIZE=str(world), GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1",
            TORCHDYNAMO_DISABLE="1",  # torchtitan compiles what makes its block masks
            PYTHONPATH=os.pathsep.join([str(ROOT / "src"), str(ROOT), *sys.path]),
        )  # fmt: skip
        processes = []
        try:
            for rank in range(world):
                log = open(Path(folder, f"log{rank}"), "w")  # noqa: SIM115  # the process writes to it
                command = [sys.executable, "-m", "tests.hosts.titan_work", str(out), *texts]
                env |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log))
                log.close()
            _wait(processes, folder)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return json.loads(out.read_text())


def _wait(processes, folder):
    """Until all are done, or one failed, or time is up: whoever waits for a dead rank would wait for long."""
    end = time.monotonic() + LIMIT
    while any(process.poll() is None for process in processes):
        failed = [rank for rank, process in enumerate(processes) if process.poll()]
        if failed or time.monotonic() > end:
            rank = failed[0] if failed else 0
            text = Path(folder, f"log{rank}").read_text()
            crash = text.find("Fatal Python error")  # its first lines name the place, the last ones list modules
            raise AssertionError(f"rank {rank} (of {failed}):\n{text[crash:][:5000] if crash >= 0 else text[-3000:]}")
        time.sleep(0.1)
    assert not any(process.poll() for process in processes), Path(folder, "log0").read_text()[-3000:]


VALIDATES = ["--validator.enable", "--validator.freq", "5", "--validator.steps", "1"]


@once
def one_rank():
    """torchtitan itself with dense masks; Longspan; the same with windows."""
    return train(
        1,
        job("llama3", "llama3_debugmodel", *STOCK, *VALIDATES, overrides=["dense"]),
        job(*OURS, *VALIDATES),
        job("tests.hosts.titan_work", "windowed_dense", *STOCK, steps=3),
        "refusals", "masks", "call", "windows",
        job("qwen3", "qwen3_debugmodel", *STOCK, steps=1, overrides=["dense"]),
        "lengths",
    )  # fmt: skip


@once
def two_ranks():
    last, changed, untold = '"last_only": true', '"changed": true', '"told": false'
    return train(
        2,
        job(*OURS, *CP, *VALIDATES),
        job("tests.hosts.titan_work", "windowed", *CP, steps=3),
        job(*OURS, *CP, "--parallelism.context_parallel_load_balancer", "headtail", steps=2),
        job(*OURS, *CP, "--parallelism.context_parallel_load_balancer", "None", steps=2),
        *(
            job(*OURS, *CP, steps=1, documents=f"={{{', '.join(fields)}}}")
            for fields in ([last], [last, changed], [last, untold], [last, changed, untold])
        ),
        job(*OURS, *CP, steps=1, dtype="bfloat16"),
        job(OURS[0], "qwen3_debugmodel", *CP, steps=1),
    )


@once
def four_ranks():
    return train(
        4,
        job(*OURS, *CP, "--parallelism.data_parallel_shard_degree", "2", rows=2),
        job(*OURS, *CP, "--parallelism.data_parallel_replicate_degree", "2", rows=2, steps=2),
        job(*OURS, *CP, "--parallelism.tensor_parallel_degree", "2", steps=2),
    )


def check_same(run, meant, steps=10):
    """Losses to 5 decimals and gradient norms, step by step. The schedule of learning rates depends on the number of
    steps, so of shorter runs the first two are compared: the first has a learning rate of its own, too."""
    assert len(run["steps"]) == steps
    for (loss, norm, exact, seen), (meant_loss, meant_norm, meant_exact, meant_seen) in zip(
        run["steps"], meant["steps"], strict=False
    ):
        assert loss == pytest.approx(meant_loss, abs=5e-6)
        assert exact == pytest.approx(meant_exact, rel=1e-5)
        assert norm == pytest.approx(meant_norm, rel=2e-5)
        assert seen == meant_seen
    assert run["validation"] == pytest.approx(meant["validation"][: len(run["validation"])], abs=5e-6)


@pytest.mark.nightly
def test_one_rank_trains_as_torchtitan_with_dense_masks():
    reference, ours, *_ = one_rank()
    assert len(reference["steps"]) == 10
    assert len(reference["validation"]) == 3
    check_same(ours, reference)


@pytest.mark.nightly  # four with FSDP always
def test_two_ranks_train_as_one():
    check_same(two_ranks()[0], one_rank()[0])
    assert two_ranks()[0]["tokens_local"] == 10 * 4 * 64 // 2
    for run in two_ranks()[2:4]:  # other layouts
        check_same(run, one_rank()[0], steps=2)


@pytest.mark.nightly
def test_two_ranks_train_in_torchtitans_default_precision():
    """bfloat16 has 8 bits: the loss, a mean over some 300 tokens, is off by less than one of its roundings."""
    (loss, *_), (meant, *_) = two_ranks()[8]["steps"][0], one_rank()[0]["steps"][0]
    assert loss == pytest.approx(meant, rel=2**-8)


def test_qwen3_trains_as_dense():
    """Query heads share key heads, embeddings are tied."""
    check_same(two_ranks()[9], one_rank()[7], steps=1)


def test_windows_of_gpt_oss_are_read():
    """Documents of 30 and 170 tokens; layers see all or 128 tokens back. Its MoE layers do not run on CPUs."""
    pairs, lefts = one_rank()[6]
    causal = 30 * 31 // 2 + 170 * 171 // 2
    assert pairs == {"basic_mask": causal, "sliding_window_mask": causal - (170 - 128) * (171 - 128) // 2}
    assert lefts == [-1, 127]


def test_windows_train_as_dense_ones():
    check_same(two_ranks()[1], one_rank()[2], steps=3)
    assert two_ranks()[1]["steps"][0][0] != pytest.approx(one_rank()[0]["steps"][0][0], abs=1e-4)


def test_four_ranks_with_fsdp_train_as_one():
    check_same(four_ranks()[0], one_rank()[0])


@pytest.mark.parametrize("number", [1, 2], ids=["replicated", "tensor parallel"])
def test_four_ranks_with_other_axes_train_as_one(number):
    check_same(four_ranks()[number], one_rank()[0], steps=2)


def test_documents_do_not_see_each_other():
    """The last document of every row has the labels, the tokens of the others change: the loss must not. If nobody
    says where documents start, it does, so that this test can fail."""
    plain, changed, plain_untold, changed_untold = (run["steps"][0][0] for run in two_ranks()[4:8])
    assert changed == pytest.approx(plain, abs=1e-6)
    assert abs(changed_untold - plain_untold) > 1e-4


def test_masks_mean_what_torchtitans_functions_say():
    found = one_rank()[4]
    opaque = {name for name, (closed, _, _) in found.items() if not closed}
    assert all(wrong == 0 and allowed for _, wrong, allowed in found.values()), found
    assert {name.split(",")[0] for name in opaque} == {"packed alone", "documents of others", "own function"}


def test_lengths_that_ranks_do_not_divide_need_no_padding():
    """A data loader of one's own may return lengths that torchtitan does not check. Padding would be a label of the
    loss, and a token of the experts."""
    labels = [label for (row,) in one_rank()[8] for label in row]
    assert sorted(labels) == [*range(1, 8)]


def test_score_functions_and_output_transforms_are_honoured():
    assert one_rank()[5] < 1e-12


@pytest.mark.parametrize("balancer", BALANCERS)
def test_balancers_deal_equally_many_tokens(balancer):
    masks = {"all": causal(1024), "near": documents([700, 324]) & sliding_window(50)}
    layout = layout_of(balancer, masks, 1024, 4, "all")
    assert layout.num_tokens.tolist() == [256] * 4
    assert sorted(np.concatenate([layout.positions(rank) for rank in range(4)])) == list(range(1024))


REFUSED = {
    "newer version": ("0.4.0", "0.3.0"),
    "no version": ("not installed", "0.3.0"),
    "spmd_types": ("spmd_backend = 'spmd_types'", "partial_dtensor"),
    "full_dtensor": ("spmd_backend = 'full_dtensor'", "partial_dtensor"),
    "pipeline": ("pipeline_parallel_degree = 2", "Use 1"),
    "experts": ("expert_parallel_degree = 2", "Use 1"),
    "compile": ("compile.enable", "Leave 'model' out"),
    "graphs": ("disable_cuda_graphs = False", "first batch's plan"),
    "balancer": ("'zigzag'", "'balanced', 'headtail', 'ptrr', None"),
    "validator": ("Validator.Config", "LongspanValidator"),
    "ptrr length": ("seq_len = 96", "multiple of 256"),
    "ptrr key": ("['a', 'b']", "context_parallel_ptrr_mask_key is None"),
    "trainer": ("FluxTrainer.Config", "LongspanTrainer"),
    "model": ("'hybrid'", "any_model=True"),
    "hybrid config": ("'qwen35_debugmodel'", "'qwen3_5'", "GatedDeltaNet", "empty", "llama3"),
    "other config": ("'kimi_k2_5_debugmodel'", "'kimi_k2_7'", "llama3"),
    "hybrid": ("'own'", "layers.1.feed_forward is a TinyDeltaNet", "empty", "Hugging Face"),
    "convolution": ("layers.1.feed_forward.conv is a Conv1d", "gated_delta_rule"),
    "built hybrid": ("mixer is a GRU", "empty"),
    "kernel_options": ("BACKEND", "layers.1.attention", "attn_backend='flex'"),
    "bidirectional": ("window_size=(-1, -1)", "causal VarlenAttention"),
    "sdpa": ("ScaledDotProductAttention", "attn_backend='flex'"),
    "block mask": ("BlockMask", "with_longspan"),
    "dtensor": ("Replicate", "local tensors"),
    "scores of split heads": ("split over 2 ranks", "tensor_parallel_degree 1"),
    "unknown argument": ("is_causal", "drop"),
    "varlen metadata": ("VarlenMetadata", "BlockMask"),
    "short block mask": ("16 queries and 16 keys", "8 and 8"),
    "3-d positions": ("(3, 1, 8)", "(batch, tokens)"),
    "no attention": ("'llama3'", "no attention"),
    "images": ("pixel_values", "'input' and 'positions'"),
    "no positions": ("a batch has input,", "where documents start"),
    "overridden": ("DenseAttention", "Do not override"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    message = one_rank()[3][name]
    for text in REFUSED[name]:
        assert text in message


def test_every_refusal_is_asserted():
    assert one_rank()[3].keys() == REFUSED.keys()


def test_examples_of_masks():
    """Here and not by pytest, which would ask the package for names, and so import torchtitan."""
    names = {"causal": causal, "documents": documents, "sliding_window": sliding_window}
    found = doctest.testmod(titan_masks, extraglobs=names)
    assert found.attempted > 3
    assert not found.failed
