"""The call of a batch norm module, whichever function computes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from primitives._core.errors import MutationError
from primitives._core.write_back import count_up, cumulative_weight


def batch_normed(function: Callable[..., Tensor], module: Any, input: Tensor) -> Tensor:
    """The result of a batch norm for `input` by `function`; in training, its running statistics move on."""
    check = getattr(module, "_check_input_dim", None)  # TorchScript passes an object without the other methods.
    if check is not None:
        check(input)
    mean, var, training = module.running_mean, module.running_var, module.training
    use_batch = training or (mean is None and var is None)
    update = training and module.track_running_stats
    if training and not update:
        mean = var = None
    count = module.num_batches_tracked if update else None
    momentum = module.momentum if update else 0.0
    if momentum is None:
        # The plain average over all batches. Not read as a Python number, which all would have to wait for.
        momentum = 0.0 if count is None else cumulative_weight(count + 1)
    try:
        output = function(input, mean, var, module.weight, module.bias, use_batch, momentum, module.eps)
    except MutationError as error:
        raise MutationError(f"{type(module).__name__}: {error}") from None
    if count is not None:
        # Counted last: a call that raises leaves the module as it was.
        count_up(count)
    return output
