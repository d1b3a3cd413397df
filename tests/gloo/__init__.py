"""Real ranks: processes that talk over Gloo. What they run is in `..._work.py`."""
