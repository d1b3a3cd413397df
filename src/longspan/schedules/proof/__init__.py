"""Proofs that know no planner: every allowed pair exactly once, nothing used before it is held."""
