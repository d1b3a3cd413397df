"""The proof that a model is exact over ranks, by a tiny copy on simulated ranks: the tool behind `longspan prove`.

`families.py` and `tiny.py` (what is proved), `batches.py`, `trials.py` (how), `detect.py` (rules), `check.py` (the
comparison), `table.py` (`rules.json`).
"""
