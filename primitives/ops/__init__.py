"""One family of operations a folder, one operation a file: formulas, schema, reference, kernels, rules, and checks.

The rules of second order lie in a file of their own beside it, and importing the package registers all of them.
"""

from primitives.ops import attention as attention
from primitives.ops import dropout as dropout
from primitives.ops import losses as losses
from primitives.ops import norms as norms
from primitives.ops import softmax as softmax
