"""Training on the stand-in device: losses, FSDP2, checkpointing, compiled code and Hugging Face, beside one CPU; and
where the host waits for the device in a warm step."""

import pytest

from tests.device import training_work as work
from tests.device.ranks import ranks


def test_losses_are_those_of_the_cpu():
    assert ranks(2).run(work.losses, ("slow messages", "all late")) == [3, 3]


@pytest.mark.share(3)
@pytest.mark.parametrize("form", ["standin", "cuda"])
@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("schedule", ["slow messages", "late messages"])
def test_fsdp2(form, kind, schedule):
    for off, waits in ranks(2, form).run(work.fsdp, kind, schedule):
        assert off < 5e-7
        assert waits == []


@pytest.mark.share(2)
@pytest.mark.parametrize("form", ["standin", "cuda"])
def test_compiled_blocks(form):
    for off in ranks(2, form).run(work.compiled, "aot_eager", timeout=300):
        assert off < 1e-6


@pytest.mark.share(2)
@pytest.mark.parametrize("form", ["standin", "cuda"])
@pytest.mark.parametrize(("family", "kind"), [("mistral", "plain"), ("llama", "packed"), ("gemma2", "padded")])
def test_huggingface_steps(form, family, kind):
    found = ranks(2, form).run(work.huggingface_step, family, kind, "late messages", family == "mistral")
    for (loss, gradients, size), waits, waits_before in found:
        assert loss < 1e-5
        assert gradients < 1e-5 * max(size, 1)
        assert waits == []
        # Documents and padding decide the mask, so they are read, once; a batch without them is not looked at.
        assert len(waits_before) == (kind != "plain"), waits_before
        assert all(wait.startswith("copy to the host at ") for wait in waits_before), waits_before


def test_huggingface_trainer():
    """On "cuda" alone: accelerate chooses devices by names that it knows."""
    (alone,) = ranks(1, "cuda").run(work.huggingface_trainer, 4, timeout=300)
    for losses in ranks(2, "cuda").run(work.huggingface_trainer, 4, timeout=300):
        assert len(losses) == 4
        assert losses == pytest.approx(alone, abs=2e-4)


def test_huggingface_trainer_with_fsdp2_of_accelerate():
    """accelerate shards on devices that it knows, and not on CPUs: see `fsdp` of the work for the three ways."""
    (alone,) = ranks(1, "cuda").run(work.huggingface_trainer, 4, timeout=300)
    for fsdp in ("arguments", "mesh", "launcher"):
        for losses in ranks(2, "cuda").run(work.huggingface_trainer, 4, fsdp, timeout=300):
            assert losses == pytest.approx(alone, abs=1e-5), fsdp  # 5e-7 is usual


def test_warm_losses_wait_for_labels_alone():
    """Labels that are on the device when a loss is computed from hidden states are read once; from logits, never."""
    for found in ranks(2).run(work.warm_loss_waits):
        assert found["token_loss"] == []
        assert [wait.partition(" at ")[0] for wait in found["token_loss of hidden states"]] == ["copy to the host"]
        assert [wait.partition(" at ")[0] for wait in found["token_logprobs"]] == ["copy to the host"]


def test_fake_batches_are_sharded():
    assert ranks(1, "cuda").run(work.fake_batches) == [[((1, 48), True), ((1, 96), True)]]
