"""Which cases of a module this run selected, for fixtures that start the jobs of all of them at once."""

from __future__ import annotations


def selected(request, parameter: str) -> list:
    """The values of `parameter` over the selected tests of the module that asks; other modules may use its name too."""
    mine = [item for item in request.session.items if getattr(item, "module", None) is request.module]  # some have none
    calls = [item.callspec.params for item in mine if hasattr(item, "callspec")]
    return [params[parameter] for params in calls if parameter in params]
