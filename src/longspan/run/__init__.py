"""Run a plan: operators, agreement between ranks, the recorded program, messages and merging."""
