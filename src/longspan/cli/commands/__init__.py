"""The subcommands of `longspan`, one file each, with `add_arguments(parser)` and `run(args) -> int`."""
