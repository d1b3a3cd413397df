"""How right an attention was, scheme by scheme: errors as shares of what rounding explains, as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from longspan.cli.screen import Column, Row, Screen

if TYPE_CHECKING:
    from longspan.verification import Report

LEGEND = (
    "Shares: the error against one device in float64, of the most that rounding explains; above 100% is wrong. Tokens"
    " that the mask hides were changed, too, and nothing else may move."
)


@dataclass(frozen=True, slots=True)
class CheckedScheme:
    """What verify found about one scheme in one dtype; by the tensor's name, its error over its budget."""

    scheme: str
    dtype: str
    ok: bool
    shares: dict[str, float]

    @staticmethod
    def of(report: Report, scheme: str, dtype: str) -> CheckedScheme:
        return CheckedScheme(scheme, dtype, report.ok, {check.tensor: check.ratio for check in report.checks})

    def as_json(self) -> dict[str, Any]:
        """Plain values; a share that is infinite, of what is not finite, becomes None."""
        shares = {name: share if math.isfinite(share) else None for name, share in self.shares.items()}
        return {"scheme": self.scheme, "dtype": self.dtype, "ok": self.ok, "shares": shares}

    @staticmethod
    def from_json(found: dict[str, Any]) -> CheckedScheme:
        shares = {name: math.inf if share is None else share for name, share in found["shares"].items()}
        return CheckedScheme(found["scheme"], found["dtype"], found["ok"], shares)


def share_text(share: float | None) -> str:
    """A share in per cent.

    >>> share_text(0.123), share_text(0.0), share_text(0.001), share_text(77.0), share_text(math.inf), share_text(None)
    ('12%', '0%', '<1%', '>999%', 'infinite', '-')
    """
    if share is None:
        return "-"
    if not math.isfinite(share):
        return "infinite"
    if share > 9.99:
        return ">999%"
    return "<1%" if 0 < share < 0.005 else f"{100 * share:.0f}%"


def show_shares(checked: Sequence[CheckedScheme], screen: Screen) -> None:
    """A row for each scheme and dtype, a column for each tensor."""
    names = list(dict.fromkeys(name for one in checked for name in one.shares))
    heads = [name.replace("gradient of ", "d") for name in names]
    columns = (Column("scheme", False), Column("dtype", False), *map(Column, heads), Column("", False))
    rows = [
        Row((one.scheme, one.dtype, *(share_text(one.shares.get(name)) for name in names), _verdict(one)))
        for one in checked
    ]
    screen.table(columns, rows)


def _verdict(one: CheckedScheme) -> str:
    return "right" if one.ok else "WRONG"
