"""Users' own operators over pytrees: the same mechanism as the package's own primitives, with another door."""

from primitives.custom._operator import CustomOp, custom_op
from primitives.custom._rules import operators
from primitives.custom._user_rule import BackwardContext, VmapInfo

__all__ = ["BackwardContext", "CustomOp", "VmapInfo", "custom_op", "operators"]
