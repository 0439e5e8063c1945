"""Parts of this package's modules beside the class of torch, and of modules of other classes after `convert`."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from primitives._core.errors import MutationError
from primitives._core.write_back import count_up, cumulative_weight


class OfThisPackage(torch.nn.Module):
    """The base of every module here: it says so in its `repr`, and is a leaf to `torch.fx`, as those of torch are."""

    # Of optree, in modules over pytrees; kept by those alone that are given one, so that state and pickles are torch's.
    namespace: str = ""

    def _over(self, namespace: str) -> None:
        if namespace:
            self.namespace = namespace

    def _get_name(self) -> str:
        return f"primitives.{type(self).__name__}"

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        # Before any hook runs: a leaf runs its hooks when the graph does.
        for value in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(value, torch.fx.Proxy) and isinstance(tracer := value.tracer, torch.fx.Tracer):
                return tracer.create_proxy("call_module", tracer.path_of_module(self), args, kwargs)
        return torch.nn.Module._call_impl(self, *args, **kwargs)


def namespace_of(module: torch.nn.Module) -> str:
    """The optree namespace of a module over pytrees."""
    # TorchScript passes an object without it, and tensors alone.
    return getattr(module, "namespace", "")


class Converted:
    """Stands for the `forward` of one module, as an attribute of the object: the module keeps its class.

    It refers to its module, and goes with it into deep copies and files. Its `function` takes the module and the
    arguments, and returns `NotImplemented` for what the class is to compute by itself.
    """

    def __init__(self, module: torch.nn.Module, function: Callable[..., Any]) -> None:
        self.module, self.function = module, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.function(self.module, *args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs) if result is NotImplemented else result

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(type(self.module).forward.__get__(self.module))

    def install(self) -> None:
        """Let the module compute by the function."""
        vars(self.module).update(forward=self, _replicate_for_data_parallel=self.replicate)

    def remove(self) -> None:
        """Let the module compute by its class."""
        for name in ("forward", "_replicate_for_data_parallel"):
            vars(self.module).pop(name)

    def replicate(self) -> torch.nn.Module:
        """A replica for `DataParallel`, which copies the attributes of the module, this object among them."""
        replica = type(self.module)._replicate_for_data_parallel(self.module)
        Converted(replica, self.function).install()
        return replica


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
