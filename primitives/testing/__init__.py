"""Proof of an operator's rules: `check_rules` holds them to the reference, to differences and to one another."""

from primitives.testing._check import PROPERTIES, check_rule, check_rules
from primitives.testing._report import Report, Row, RuleError

__all__ = ["PROPERTIES", "Report", "Row", "RuleError", "check_rule", "check_rules"]
