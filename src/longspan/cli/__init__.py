"""The `longspan` command. Every subcommand is a module with `add_arguments(parser)` and `run(args) -> int`.

Only the module of the chosen subcommand is loaded, and torch only by those that run attention.
"""

from longspan.cli.command import main

__all__ = ["main"]
