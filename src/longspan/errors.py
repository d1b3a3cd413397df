"""The error tree: every refusal says what was asked, what was found and what to do."""


class LongspanError(Exception):
    """Root of everything Longspan raises on purpose."""


class MaskError(LongspanError, ValueError):
    """A mask that cannot mean what was asked."""


class LayoutError(LongspanError, ValueError):
    """A layout that cannot hold the sequence as asked."""


class ScheduleError(LongspanError, ValueError):
    """A schedule that is malformed, incomplete or impossible."""


class PlanError(LongspanError, ValueError):
    """A plan that cannot be made from the given mask, layout and shapes."""


class KernelError(LongspanError, ValueError):
    """A kernel that does not exist or cannot take the given tensors."""


class AgreementError(LongspanError, ValueError):
    """Ranks of a group that were asked for different things."""


class BusyError(LongspanError, RuntimeError):
    """A group that another thread of this process is using."""


class RankError(LongspanError, RuntimeError):
    """A rank that died, stopped, raised, or went another way than the others."""
