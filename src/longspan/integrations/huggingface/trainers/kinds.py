"""Which of TRL's trainers a class is, and whether Longspan knows it."""

from __future__ import annotations

from longspan.training import BatchError

PLAIN, PARTS, SCORES, DISTILLS = "plain", "parts", "scores", "distills"
WHOLE = (SCORES, DISTILLS)
"""Trainers that are handed whole sequences: what they call goes over ranks, not what they are called with."""
KINDS = {
    "SFTTrainer": PARTS,
    "DPOTrainer": SCORES,
    "GRPOTrainer": SCORES,
    "RLOOTrainer": SCORES,
    "DistillationTrainer": DISTILLS,
}
"""How the loss is computed: of a rank's part; from numbers of all tokens; by a divergence of a rank's tokens."""


def kind_of(trainer: type) -> str:
    """The way that a trainer's loss is computed over ranks; a trainer of TRL that is not known is refused.

    >>> kind_of(object)
    'plain'
    """
    own = [base for base in trainer.__mro__ if base.__module__.split(".")[0] == "trl" and "compute_loss" in vars(base)]
    for base in trainer.__mro__:
        if base.__module__.startswith("trl.") and base.__name__ in KINDS:
            return KINDS[base.__name__]
    if own:
        raise BatchError(
            f"{own[0].__name__} of TRL has a loss of its own, and nobody has looked at what it computes over ranks."
            f" Those that train on split sequences are {', '.join(KINDS)}; or write its loss in a loop of your own,"
            f" with longspan.training."
        )
    return PLAIN
