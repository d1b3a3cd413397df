"""The engine: one runner walks a plan's steps, whatever planner made them.

Read `runner.py` first, then `forward.py` and `backward.py`, which fill in what a step computes and sends.
"""
