"""Dropout and its random words; importing the package registers their primitives."""

from primitives.ops.dropout import dropout as dropout
from primitives.ops.dropout import philox as philox
