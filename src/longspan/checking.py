"""The former name of `longspan.verification`, kept for programs that import from here."""

from longspan.verification import Check, Finding, Report, VerifyError, loopback_attention, verify, verify_model

__all__ = ["Check", "Finding", "Report", "VerifyError", "loopback_attention", "verify", "verify_model"]
