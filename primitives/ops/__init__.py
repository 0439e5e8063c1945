"""One family of operations a folder, one operation a file: formulas, schema, reference, kernels, rules, and checks.

Importing the package registers all of them.
"""

from primitives.ops import attention as attention
from primitives.ops import dropout as dropout
from primitives.ops import losses as losses
from primitives.ops import norms as norms
from primitives.ops import softmax as softmax
