"""What ranks of a pool run for tests of the command line: a command, with what it printed."""

import contextlib
import io

from longspan.cli import main


def command(*words):
    """(exit code, stdout, stderr) of a command on this rank."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    return code, out.getvalue(), err.getvalue()
