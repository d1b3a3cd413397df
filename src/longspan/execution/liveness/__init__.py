"""Is the rank we wait for dead, stopped or only slow? `detector.py` decides; the others see, ask and wait for it."""
