"""Models and uses of transformers that attacks on the contract had left undecided: computed as on one device, or
refused in words on every rank.

In float64 everything that transformers computes in float32 is widened, so that errors are rounding of float64 alone.
Limits of lower precision are the errors of one device in the same dtype.
"""

import pytest

from tests.lanes import NIGHTLY
from tests.pool import pool

pytest.importorskip("transformers")
from tests.breaks import hf_models_work as models
from tests.breaks import hf_uses_work as uses
from tests.hosts import hf_versions

TIMEOUT = 250.0
pytestmark = [
    pytest.mark.timeout(3600 if NIGHTLY else 600),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.skipif(not hf_versions.HAS_HYBRIDS, reason="models are of transformers 5.15 and later"),
]
LIMIT = 1e-10
"""Gradients that cancel to 1e-5 of others keep eleven digits (A_log of Qwen3-Next)."""
TIMES = 8
"""By so much errors of float32 and bfloat16 may be larger over ranks than on one device: sums have another order."""
LAYOUTS = ("balanced", "zigzag", "contiguous")


def nightly(always, others):
    """Cases that always run, and the others at night."""
    return [*always, *(others if NIGHTLY else ())]


def is_right(found, limit=LIMIT):
    """Whether errors (loss, gradients, ...) of every rank are within the limit."""
    return all(not isinstance(one, str) and one[0] <= limit and one[1] <= limit for one in found)


def check(found, limit=LIMIT):
    assert is_right(found, limit), found


STEPS = nightly(
    [("gpt_oss", 2, "left"), ("mixtral", 2, "packed"), ("qwen3_next", 2, "cu_seq_lens"), ("bamba", 2, "seq_idx")],
    [(family, world, case) for family in models.MODELS for world in (2, 3) for case in models.CASES],
)


def test_a_step_is_that_of_one_device(tries):
    """Sinks, latent attention, balanced experts and recurrences, with padding and packed documents."""
    for number, (family, world, case) in enumerate(STEPS):
        for layout in LAYOUTS if NIGHTLY else LAYOUTS[number % 3 :][:1]:
            found = pool(world).run(models.step, family, case, layout, timeout=TIMEOUT)
            assert is_right(found), (family, world, case, layout, found)
    count = len(STEPS) * (len(LAYOUTS) if NIGHTLY else 1)
    tries("Hugging Face: experts, sinks, hybrids", count, count)


FLOAT32 = nightly(
    [("qwen3_moe", "right")],
    [(family, case) for family in models.MODELS for case in ("plain", "left", "packed")],
)


def test_checkpointed_float32_is_as_right_as_one_device(tries):
    """With grouped matmuls, which have no float64, and layers that are recomputed in backward."""
    for family, case in FLOAT32:
        for mine, alone in pool(2).run(models.float32_errors, family, case, timeout=TIMEOUT):
            limit = TIMES * max(alone[1], 2.0**-22)  # losses are rounded when ranks add their shares
            check([mine], limit)
    tries("Hugging Face: float32, checkpointed", len(FLOAT32), len(FLOAT32))


IMAGES = nightly(
    [("qwen2_vl", "left", "zigzag")],
    [
        (family, case, layout)
        for family in ("llava", "gemma3", "qwen2_vl", "qwen2_5_vl")
        for case, layout in zip(("plain", "right", "left"), LAYOUTS, strict=True)
    ],
)


def test_images_across_ranks(tries):
    for family, case, layout in IMAGES:
        check(pool(2).run(uses.images, family, case, layout, timeout=TIMEOUT))
    tries("Hugging Face: images", len(IMAGES), len(IMAGES))


def test_encoder_decoders_are_refused_on_every_rank(tries):
    for found in pool(2).run(uses.encoder_decoders, timeout=TIMEOUT):
        for name, words in found.items():
            reason = "position_bias" if name == "T5EncoderModel" else "has an encoder and a decoder"
            assert reason in str(words), (name, words)
    tries("Hugging Face: encoder-decoders", len(found), 0, len(found))


UNUSUAL = nightly(["opt", "recurrent_gemma", "jamba"], ["stablelm", "nemotron", "roberta"])
REFUSED = {"recurrent_gemma": "RecurrentGemmaRecurrentBlock", "jamba": "calls mamba_selective_scan"}


def test_models_with_ways_of_their_own(tries):
    refused = 0
    for family in UNUSUAL:
        found = pool(2).run(uses.unusual, family, timeout=TIMEOUT)
        if family in REFUSED:
            assert all(REFUSED[family] in words for words in found), found
            refused += 1
        else:
            check(found)
    tries("Hugging Face: positions and mixing of their own", len(UNUSUAL), len(UNUSUAL) - refused, refused)


CLASSIFIERS = nightly(
    [("GPT2ForSequenceClassification", "left")],
    [
        (f"{name}For{head}", case)
        for name, head in (
            *((name, "SequenceClassification") for name in ("Llama", "Qwen3", "Mixtral", "Bert", "GPT2")),
            ("Llama", "TokenClassification"), ("Llama", "QuestionAnswering"),
        )
        for case in ("plain", "left", "right")
    ],
)  # fmt: skip


def test_classifiers(tries):
    for name, case in CLASSIFIERS:
        check(pool(2).run(uses.classifiers, name, case, timeout=TIMEOUT))
    tries("Hugging Face: classifiers", len(CLASSIFIERS), len(CLASSIFIERS))


WRAPPED = nightly([("gpt_oss", "FSDP2")], [("qwen3_next", "FSDP2"), ("granitemoehybrid", "DDP")])


def test_wrapped_models(tries):
    for family, wrapper in WRAPPED:
        for mine, alone in pool(2).run(uses.wrapped, family, wrapper, timeout=TIMEOUT):
            check([mine], TIMES * max(alone[1], 2.0**-22))
    tries("Hugging Face: FSDP2 and DDP", len(WRAPPED), len(WRAPPED))


LOW = nightly([("bamba", True)], [("llama", False), ("llama", True), ("bamba", False)])


def test_bfloat16_is_as_right_as_on_one_device(tries):
    for family, is_autocast in LOW:
        for mine, alone in pool(2).run(uses.low_precision, family, is_autocast, timeout=TIMEOUT):
            assert mine[0] <= TIMES * max(alone[0], 2.0**-10), (family, mine, alone)
            assert mine[1] <= 2 * alone[1], (family, mine, alone)
    tries("Hugging Face: bfloat16 and autocast", len(LOW), len(LOW))


FEW = nightly(
    [(3, "llama", 2, "zigzag"), (4, "lfm2", 3, "balanced"), (2, "mixtral", 2, "balanced")],
    [
        (world, family, tokens, layout)
        for world in (2, 3, 4)
        for family in ("llama", "lfm2", "mixtral", "qwen3_next")
        for tokens in (2, 3, 4)
        for layout in (*LAYOUTS, "striped")
    ],
)


def test_fewer_tokens_than_ranks(tries):
    for world, family, tokens, layout in FEW:
        check(pool(world).run(uses.few_tokens, family, tokens, layout, timeout=TIMEOUT))
    tries("Hugging Face: as many tokens as ranks", len(FEW), len(FEW))


def test_odd_head_dims(tries):
    sizes = nightly([7], [1, 257])
    for head_dim in sizes:
        check(pool(2).run(uses.head_dims, head_dim, timeout=TIMEOUT))
    tries("Hugging Face: head_dim", len(sizes), len(sizes))


def test_models_that_run_inside_of_another(tries):
    """A teacher that runs in a student's forward pass, over ranks and on one device."""
    for errors, teacher, alone in pool(2).run(uses.nested, timeout=TIMEOUT):
        check([errors])
        assert max(teacher, alone) <= LIMIT
    tries("Hugging Face: nested calls", 3, 3)


PLANS = 64
"""Plans of one kind that are kept, whatever the number of steps."""


@pytest.mark.parametrize("family", nightly(["lfm2"], ["llama"]))
def test_other_shapes_in_every_step_do_not_fill_memory(family, tries):
    steps, warm_up = (300, 200) if NIGHTLY else (24, 12)
    for grown, sequences, plans in pool(2).run(uses.many_shapes, family, steps, warm_up, timeout=2 * TIMEOUT):
        assert sequences == 0
        assert plans <= (PLANS if family == "llama" else 2 * PLANS)  # convolutions have plans of their own
        assert not NIGHTLY or grown < 8 * 2**20, f"{grown} bytes more after {warm_up} steps"
    tries("Hugging Face: steps of other shapes", steps, steps)
