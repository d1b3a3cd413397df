"""`python -m longspan`, and under torchrun `torchrun -m longspan`: the `longspan` command."""

import sys

from longspan.cli import main

if __name__ == "__main__":
    sys.exit(main())
