"""Supervised fine-tuning, on responses only: torchrun --nproc-per-node 2 examples/losses/sft.py"""

import torch
from common import train

from longspan.training import token_loss


def sft(model, frozen, step):
    logits = step.run(model).logits
    return token_loss(logits, step.mine["shift_labels"], group=step.group, gradients="average")  # FSDP averages


def plain(model, frozen, data):
    """Compute the mean over all tokens of responses in one process."""
    logprobs = [document.scores.logprobs[document.response] for document in data.documents(model)]
    return -torch.cat(logprobs).mean()


if __name__ == "__main__":
    train(sft, plain)
