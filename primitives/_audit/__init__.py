"""`audit`: which derivatives of a function torch gets right, and what to do about the others."""

from primitives._audit.function import audit
from primitives._audit.report import AuditReport, Finding

__all__ = ["AuditReport", "Finding", "audit"]
