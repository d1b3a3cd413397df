"""Run a plan: messages, packing, the recorded program, merges, and the operators that autograd sees."""
