"""`watch`: detect failed ranks during a training loop. `attempt_store`: the store of a restarted job."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from longspan._torch import attempt_store_of
from longspan.run.group import Members, Safety, members_of, safely
from longspan.training.groups import BatchError, process_group
from longspan.validate import Group


@dataclass(frozen=True)
class Watching:
    """The ranks that are watched."""

    members: Members

    def step(self, number: int) -> None:
        """Says which training step this rank is in. Ranks that meet in different ones are refused, so a rank that
        skipped a step cannot go on unnoticed."""
        if isinstance(number, bool) or not isinstance(number, int) or number < 0:
            raise BatchError(f"step({number!r}) was asked for. It is the number of the training step, 0 or more.")
        self.members.check_told()
        self.members.training_step = number
        self.members.tell_step()


@contextmanager
def watch(
    group: Group, *, enabled: bool = True, patience: float = 2.0, timeout: float | None = None, checked: bool = False
) -> Iterator[Watching]:
    """Watches the ranks of a group while a training loop runs inside.

    Calls of attention are watched without this, too: a rank that dies, stops or raises inside of one is named on all
    others. What this adds: the others also hear of exceptions elsewhere in the loop, with their text; `step` finds
    ranks that skipped one; and the settings. `patience` is the number of seconds for which a rank may be stopped, or
    its host silent; `timeout` is how long to wait for one that is alive but busy (the group's own if None), with
    warnings by the logger "longspan" meanwhile; `checked` puts a header and a checksum on every message.
    `enabled=False` turns watching off.
    """
    members = members_of(process_group(group, "watch", real=True))
    settings = Safety(patience if enabled else 0.0, timeout, checked)
    members.watch(settings)  # others see this rank from here on, not from its first call on
    with safely(settings):
        try:
            yield Watching(members)
            members.check_told()
        except BaseException as error:
            if not _ends_well(error):
                members.tell(error, settings)
            raise
        finally:
            members.training_step = -1
            members.tell_step()


def _ends_well(error: BaseException) -> bool:
    """Whether this is how a loop ends early on purpose."""
    return isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and error.code in (None, 0))


def attempt_store(timeout: float = 60.0) -> Any:
    """The launcher's store under a prefix of this attempt, for `init_process_group("gloo", store=..., rank=...)`.

    After `torchrun --max-restarts` has started all ranks again, the store still holds the addresses of processes that
    are gone, and Gloo would try to reach those.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE") if name not in os.environ]
    if missing:
        raise BatchError(
            f"attempt_store() reads what a launcher sets, but {', '.join(missing)} are not set. Start the ranks with"
            f" torchrun, or give init_process_group a store of your own."
        )
    return attempt_store_of(timedelta(seconds=timeout))
