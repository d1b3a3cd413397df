"""Files that commands are told to read or to write, looked at before anything is computed."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path


def to_write(*endings: str) -> Callable[[str], Path]:
    """A type of argument: the name of a file that can be written, with one of these endings, if any are given.

    >>> to_write(".svg", ".png")("curves.pdf")
    Traceback (most recent call last):
    argparse.ArgumentTypeError: 'curves.pdf' was given. Its name must end in .svg or .png, which say what is written.
    """

    def path_of(text: str) -> Path:
        path = Path(text)
        if endings and path.suffix.lower() not in endings:
            raise argparse.ArgumentTypeError(
                f"{text!r:.80} was given. Its name must end in {' or '.join(endings)}, which"
                f" {'says' if len(endings) == 1 else 'say'} what is written."
            )
        if path.is_dir():
            raise argparse.ArgumentTypeError(f"{text!r:.80} is a folder. Name a file in it.")
        if not path.parent.is_dir():
            raise argparse.ArgumentTypeError(
                f"{text!r:.80} cannot be written: there is no folder {str(path.parent)!r:.80}. Make it first."
            )
        return path

    return path_of


def missing(text: str) -> str:
    """What to say of a name that may have been meant as a file; nothing where it does not look like one.

    >>> missing("runs/lengths.txt"), missing("longtial")
    (" There is no file 'runs/lengths.txt' here.", '')
    """
    looks_like_one = "/" in text or "\\" in text or bool(Path(text).suffix)
    if not looks_like_one or Path(text).is_file():
        return ""
    return f" {text!r:.80} is a folder." if Path(text).is_dir() else f" There is no file {text!r:.80} here."
