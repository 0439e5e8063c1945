"""Work that the server of `processes` does once, before processes are forked from it: each would take seconds."""

import pytest  # noqa: F401 - for tests that are unpickled
import torch
import torch.distributed.tensor
from torch.func import jvp

import primitives as pr
import tests.support  # noqa: F401 - as above

torch.set_num_threads(1)
_x = torch.ones(2, 2)
# The first transforms load torch's tables of decompositions, and the first compiled function most of its compiler. No
# backward: torch 2.11 refuses one in what is forked after it.
torch.compile(lambda x: x.sin(), backend="aot_eager")(_x)
jvp(lambda x: pr.functional.batch_norm(x, None, None, training=True), (_x,), (_x,))
