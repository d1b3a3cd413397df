"""Scans along the segments of documents, as plans: who sends which states and maps when."""
