"""Rows of all ranks compared through the job's store, for groups that can send nothing from CPUs.

No device takes part, so a host that compares does not wait for what its device has still to do. Three ranks, of which
the last has another row:

    rank 0   claims "call 7": its row is the one to compare with; it is the 1st to come, and waits
    rank 1   finds the row of rank 0, which is its own; the 2nd to come, and waits
    rank 2   finds a row that is not its own: writes its own beside it; the 3rd to come, it says that there is another

A rank that comes to the next comparison has read all of this one: the last to come there clears it away.
"""

from __future__ import annotations

from collections.abc import Sequence

from longspan.errors import RankError
from longspan.execution.liveness.job_store import Store
from longspan.execution.liveness.store_client import LostError

SAME, DIFFERENT = b"same", b"different"


class Comparison:
    """One comparison. It is waited for like a message, by a thread that does nothing else."""

    def __init__(self, store: Store, place: tuple[int, int], names: tuple[str, str], row: bytes) -> None:
        """`place` is this rank and how many there are; `names` are those of this comparison and of the one before,
        which may be cleared away, or "" for none."""
        self.store, self.row = store, row
        self.rank, self.size = place
        self.name, self.before = names
        self.rows: Sequence[bytes] = ()
        """Every rank's row where they differ, this rank's alone where not."""

    def wait(self) -> bool:
        """Returns when all ranks have come."""
        store, name = self.store, self.name
        first = store.claim(name, self.row)
        if first != self.row:
            store.set(f"{name}/{self.rank}", self.row)
            store.add(f"{name}/others", 1)
        if store.add(f"{name}/came", 1) == self.size:
            store.set(f"{name}/end", SAME if store.add(f"{name}/others", 0) == 0 else DIFFERENT)
            self._clear()
        else:
            store.wait(f"{name}/end")
        if store.get(f"{name}/end") == SAME:
            self.rows = [self.row]
        else:
            self.rows = [store.get(f"{name}/{rank}") or first for rank in range(self.size)]
        return True

    def _clear(self) -> None:
        if self.before:
            for end in ("", "/others", "/came", "/end"):
                self.store.delete(f"{self.before}{end}")


def rows_alone(
    store: Store, place: tuple[int, int], names: tuple[str, str], row: bytes, timeout: float
) -> Sequence[bytes]:
    """The rows of a comparison that nobody watches."""
    connection = store.again(timeout)
    try:
        found = Comparison(connection, place, names, row)
        found.wait()
    except LostError as error:
        raise RankError(
            f"rank {place[0]} of {place[1]} could not compare its call with the others within {timeout:.0f} s: {error}."
            f" A rank did not come, or the job's store is gone; nobody watches here (patience = 0), so nobody is named."
        ) from None
    finally:
        connection.close()
    return found.rows
