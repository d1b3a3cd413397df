"""Random calls against dense float64: `python -m tests.fuzz --minutes 60`.

In reading order: `cases.py` (what a case is: a plain value), `draw.py` (a case from a seed), `oracle.py` (what must
come out; nothing of Longspan), `calls.py` (the same in Longspan's words), `expected.py` (the truth and its limits),
`work.py` (one rank runs a case and compares), `pools.py` (a case on a pool of ranks), `shrink.py` (a smaller case that
fails alike), `script.py` (a file that repeats it), `mutants.py` (mistakes that must be found).
"""
