"""Random operations as functions of an explicit Philox state that is handed in, and handed out advanced."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from primitives._core.contexts import Decorates
from primitives._core.errors import DtypeError, MissingRuleError, ShapeError
from primitives.ops.dropout.philox import WORDS_PER_BLOCK, philox_p
from primitives.tracing import _torch_private as torch_private
from primitives.tracing._errors import errors_in_trace
from primitives.tracing._random.operations import OPERATIONS, arguments_of, draw, draws_nothing, is_random
from primitives.tracing._recompute import replaying_checkpoints


class PhiloxState(NamedTuple):
    """Where a stream of random numbers is: a pytree of two int64 tensors without axes.

    Save it as a dictionary of tensors, `state._asdict()`, with `torch.save` or in a `state_dict`, and make it again
    by `PhiloxState(**saved)`.

    Attributes:
        seed: Which stream.
        offset: Number of the next unused block of four 32-bit words in it.
    """

    seed: Tensor
    offset: Tensor

    @classmethod
    def from_seed(cls, seed: int, *, device: torch.device | str | None = None) -> PhiloxState:
        """The beginning of the stream `seed`.

        Args:
            seed: Any integer of 64 bits, signed.
            device: Where the state lives; best where the random numbers are drawn.

        Returns:
            The state, with offset 0.
        """
        return cls(
            torch.tensor(seed, dtype=torch.int64, device=device), torch.zeros((), dtype=torch.int64, device=device)
        )


class rng_mode(Decorates, torch_private.TorchDispatchMode):  # noqa: N801 - used like a function, as torch.no_grad is
    """Context in which random operations draw from a Philox state, and torch's generators are left alone.

    After the context, `state` is where the stream goes on; as a decorator, it begins each call at the same state. This
    is what `functionalize_rng` puts around a function; put it around the forward part and around the backward part of a
    training function, with a state for each, to have their numbers apart.

    A region of `torch.utils.checkpoint` draws the numbers of the first time again, also when the backward pass
    runs after the context has ended.

    Args:
        state: Where the stream begins.

    Raises:
        DtypeError: If `state` is not a pair of int64 tensors.
        ShapeError: If these have axes.
        MissingRuleError: Inside, at a random operation that is not covered or is given a generator.

    Example:
        >>> import torch, primitives as pr
        >>> with pr.tracing.rng_mode(pr.tracing.PhiloxState.from_seed(0)) as mode:
        ...     x = torch.rand(6)
        >>> mode.state.offset
        tensor(2)
    """

    def __init__(self, state: PhiloxState) -> None:
        super().__init__()
        if not (isinstance(state, tuple) and [getattr(x, "dtype", None) for x in state] == [torch.int64] * 2):
            raise DtypeError(f"functionalize_rng: state must be a PhiloxState of int64 tensors, got {state!r}.")
        seed, offset = self._given = PhiloxState(*state)
        if seed.dim() or offset.dim():
            raise ShapeError(
                f"functionalize_rng: state must have no axes, got seed {list(seed.shape)} and offset "
                f"{list(offset.shape)}. For several streams at once, use vmap over the states."
            )
        if any(map(torch_private.is_in_a_transform, (seed, offset))):
            # Either of the two may be batched without the other. A result has its batch axes first, and so has a random
            # operation, which arrives below the transforms.
            seed, offset = seed + 0 * offset, offset + 0 * seed
        (self._seed, levels), (self._offset, _) = torch_private.unbatched(seed), torch_private.unbatched(offset)
        if levels and torch_private.levels_that_draw_differently()[: len(levels)] != levels:
            raise RuntimeError(
                'functionalize_rng: vmap over states must have randomness="different", and the outermost vmap that has '
                "it must be one over states."
            )
        self._batch = self._seed.shape
        self._num_blocks: Any = 0
        self._contexts: list[Any] = []

    def _again(self) -> rng_mode:
        return rng_mode(self._given)

    @property
    def state(self) -> PhiloxState:
        """The state after what has been drawn up to now."""
        return PhiloxState(self._given.seed, self._given.offset + self._num_blocks)

    @property
    def has_drawn(self) -> bool:
        """Whether anything was random up to now."""
        return not isinstance(self._num_blocks, int) or self._num_blocks > 0

    def __enter__(self) -> rng_mode:
        self._contexts.append(replaying_checkpoints(self._replay))
        self._contexts[-1].__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        self._contexts.pop().__exit__(*exc_info)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not is_random(func):
            return func(*args, **kwargs)
        if any(hasattr(kind, "__tensor_flatten__") and not issubclass(kind, _distributed_kinds()) for kind in types):
            # A subclass runs its operations on the tensors inside, where each draws its own numbers.
            return NotImplemented
        a = arguments_of(func, args, kwargs)
        if a.get("generator") is not None:
            raise MissingRuleError(
                f"functionalize_rng: {func} was given a generator, whose state would be hidden. Leave generator= out."
            )
        if draws_nothing(a):
            return func(*args, **kwargs)
        namespace, _, name = torch_private.schema_of(func).name.partition("::")
        if namespace == "aten" and name.removesuffix("_") in OPERATIONS:
            if name in ("multinomial", "randperm") and self._batch:
                raise MissingRuleError(f"functionalize_rng: {func} has no rule for vmap over states. Draw it outside.")
            return draw(name, self._source(a), a)
        definition = torch_private.definition_of(func)
        with self:
            composed = NotImplemented if definition is None else definition(*args, **kwargs)
        if composed is NotImplemented:
            raise MissingRuleError(
                f"functionalize_rng: {func} is random, and it is not known how to draw it from a Philox state. "
                "Write it in terms of operations that are (docs/reference/tracing/functionalize_rng.md lists them)."
            )
        return composed

    def _source(self, a: dict[str, Any]) -> Callable[[Sequence[Any]], Tensor]:
        """The maker of words where a call of these arguments has its result."""
        tensors = [x for x in a.values() if isinstance(x, torch.Tensor)]
        device = a.get("device")
        if device is None:
            # A tensor without axes may lie on the CPU beside others that do not.
            device = max(tensors, key=torch.Tensor.dim).device if tensors else "cpu"
        words = functools.partial(self._words, torch.device(device))
        sharded: Any = next((x for x in tensors if isinstance(x, _distributed_kinds())), None)
        if sharded is None:
            return words
        # Those of the whole tensor on every rank: they do not depend on how it is sharded.
        return lambda size: type(sharded).from_local(words(size), sharded.device_mesh, run_check=False)

    def _words(self, device: torch.device, size: Sequence[Any]) -> Tensor:
        """The next random words, of the size asked for, which begins with the batch axes of the state."""
        rest = tuple(size)[len(self._batch) :]
        if tuple(size)[: len(self._batch)] != tuple(self._batch):
            raise ShapeError(
                f"functionalize_rng: under vmap over {list(self._batch)} states, a random operation drew {list(size)}."
            )
        # The first draw of all begins at the offset itself.
        is_first = isinstance(self._num_blocks, int) and not self._num_blocks
        offset = self._offset if is_first else self._offset + self._num_blocks
        words = philox_p(self._seed.to(device), offset.to(device), rest)
        count = math.prod(rest)
        self._num_blocks = self._num_blocks + (count + WORDS_PER_BLOCK - 1) // WORDS_PER_BLOCK
        return words

    @staticmethod
    def _replay(_: bool) -> Callable[[], rng_mode] | None:
        """The maker of the context in which the draws from here on come again; `None` outside of any mode."""
        mode = next((mode for mode in reversed(torch_private.dispatch_modes()) if isinstance(mode, rng_mode)), None)
        if mode is None:
            return None
        start = mode._num_blocks
        return lambda: rng_mode(PhiloxState(mode._seed, mode._offset + start))


def _distributed_kinds() -> tuple[type, ...]:
    # Without its import such a tensor cannot exist.
    module = sys.modules.get("torch.distributed.tensor")
    return () if module is None else (module.DTensor,)


def functionalize_rng(fn: Callable[..., Any]) -> Callable[..., tuple[Any, PhiloxState]]:
    """`fn` as a function of an explicit random state.

    Every random operation in `fn`, and in the derivatives that `fn` itself takes, draws from the state that is passed
    in: two calls with one state agree bitwise, and torch's generators are neither read nor changed.

    Args:
        fn: Any function, of pytrees or of anything else.

    Returns:
        `pure(state, *args, **kwargs) -> (output, new_state)`, where `output` is what `fn(*args, **kwargs)` returns and
        `new_state` is `state`, advanced past what was drawn. `make_fx` traces it to a graph that takes seed and offset
        as inputs and holds no random operation.

    Raises:
        DtypeError: If the state is not a pair of int64 tensors.
        ShapeError: If these have axes.
        MissingRuleError: At a random operation that is not covered, or is given a generator.
        TraceError: In a trace of `make_fx`, if `fn` branches on a value that the graph does not have.

    Example:
        >>> import torch, primitives as pr
        >>> pure = pr.tracing.functionalize_rng(lambda x: torch.nn.functional.dropout(x, 0.5))
        >>> state = pr.tracing.PhiloxState.from_seed(0)
        >>> y, new_state = pure(state, torch.ones(8))
        >>> torch.equal(y, pure(state, torch.ones(8))[0]), new_state.offset
        (True, tensor(2))
    """

    @functools.wraps(fn)
    def pure(state: PhiloxState, /, *args: Any, **kwargs: Any) -> tuple[Any, PhiloxState]:
        with rng_mode(state) as mode, errors_in_trace("functionalize_rng"):
            output = fn(*args, **kwargs)
        return output, mode.state

    # Its signature is not that of `fn`.
    del pure.__wrapped__
    return pure
