"""Exception types of the package.

Each one also derives from what `torch` raises for the same mistake, so that code which catches torch's error keeps
working when it moves here.
"""

__all__ = [
    "AxisError",
    "BackendError",
    "DeviceError",
    "DtypeError",
    "LeafError",
    "MissingRuleError",
    "MutationError",
    "ShapeError",
    "TreeError",
]


class ShapeError(ValueError, RuntimeError):
    """An argument has the wrong shape, or a shape that the operation cannot take."""


class AxisError(ShapeError, IndexError):
    """An axis lies outside the axes of its tensor."""


class DeviceError(ValueError, RuntimeError):
    """Arguments that must be on one device are on several."""


class DtypeError(TypeError, NotImplementedError):
    """An argument has a dtype that the operation does not take, or one that differs from what it must match."""


class LeafError(DtypeError, ValueError):
    """A leaf of a pytree is not a tensor, or not one to differentiate: depending on where, torch raises either."""


class MissingRuleError(NotImplementedError):
    """An operation was asked for a derivative or a transform that it has no rule for."""


class TreeError(ValueError, TypeError, RuntimeError):
    """Two pytrees that must have the same structure differ."""


class BackendError(RuntimeError):
    """The chosen backend cannot run here: Triton is missing, is not ours, or has no device to run on."""


class MutationError(RuntimeError, ValueError):
    """A tensor was to be updated in place where that is impossible."""
