"""Short jobs by literal `torchrun`: does every job end as it should? `python -m tests.jobs --count 300` runs them.

In reading order: `runner.py` (runs torchrun and says how it ended), `scripts.py` (what jobs do and how they end, for
Longspan and for plain Gloo), `pages.py` (what the pages and examples print), `table.py` (all jobs, what must come out,
which are chosen).
"""
