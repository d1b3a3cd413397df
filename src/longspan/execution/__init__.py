"""From a plan to numbers: kernels, transports, merge, one runner, and the operator that autograd and compilers see.

Read `runner.py` first, then `forward.py` and `backward.py`; `ops.py` wraps them, `call.py` checks what users pass.
"""
