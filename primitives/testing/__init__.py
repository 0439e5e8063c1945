"""Proofs of an operator's rules, by its reference and by differences, and of Triton kernels, executed without a GPU."""

from primitives.testing._check import PROPERTIES, check_rule, check_rules
from primitives.testing._compare import Report, Row, RuleError
from primitives.testing._kernels import KernelError, KernelReport, check_kernel

__all__ = [
    "PROPERTIES",
    "KernelError",
    "KernelReport",
    "Report",
    "Row",
    "RuleError",
    "check_kernel",
    "check_rule",
    "check_rules",
]
