"""A case on a pool of ranks: what came out, over all of them."""

import re
from dataclasses import dataclass

from tests.pool import pool

from .cases import Case
from .work import on_a_rank

TIMEOUT = 90.0  # seconds without an answer are a hang
# Refusals that a case deserves. Any other one is a refusal without need, and counts as a failure.
DESERVED = (
    r"batch must be an integer, at least 1",
    r"head_dim must be an integer, at least 1",
)
EMPTY = ("batch", "head_dim", "v_head_dim")  # none of it must be refused; no tokens may be, or give empty tensors


@dataclass(frozen=True)
class Outcome:
    """`kind` is right, refused, wrong, raised, hung or crashed; `bad` if this case should not have ended so."""

    kind: str
    detail: str
    bad: bool


def outcome(case: Case, planted: str = "") -> Outcome:
    """Runs a case. A pool that may hold half-finished messages is made anew; one with a planted mistake keeps it."""
    ranks = pool(case.world)
    try:
        found = ranks.run(on_a_rank, case, planted, timeout=TIMEOUT)
    except TimeoutError as error:
        return Outcome("hung", str(error), True)
    except (EOFError, OSError) as error:
        ranks.end()
        return Outcome("crashed", f"a process ended: {error!r}", True)
    except AssertionError as error:
        return Outcome("crashed", str(error), True)
    kinds = {kind for kind, _ in found}
    said = "\n".join(f"rank {rank}: {kind} {detail}" for rank, (kind, detail) in enumerate(found) if detail)
    if not (kinds <= {"right", "wrong"} or kinds == {"refused"}):
        ranks.end()
    return judge(case, kinds, found[0][1], said)


def judge(case: Case, kinds: set[str], first: str, said: str) -> Outcome:
    empty = [name for name in EMPTY if any(getattr(call, name) == 0 for call in case.calls)]
    if kinds == {"right"}:
        return Outcome("right", f"{empty} = 0 was not refused" if empty else "", bool(empty))
    if kinds == {"refused"}:
        no_tokens = any(call.tokens == 0 for call in case.calls)
        deserved = no_tokens or (empty and any(re.search(words, first) for words in DESERVED))
        return Outcome("refused", first, not deserved)
    return Outcome("wrong" if kinds <= {"right", "wrong"} else "raised", said, True)
