"""`Kernel`: a Triton kernel that is launched through one dictionary look-up, traced into graphs, and watched.

Triton's own `kernel[grid](...)` binds and describes every argument anew before it finds the compiled kernel. A `Kernel`
looks it up under what the compiler can have taken into account (see `key_function`), and calls it.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import triton
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import driver
from triton.runtime.interpreter import InterpretedFunction


@triton.jit
def _probe_kernel():
    pass


# Decided when triton is imported, by TRITON_INTERPRET.
INTERPRETED = isinstance(_probe_kernel, InterpretedFunction)

# Releases of Triton that describe functions and launches as a direct launch relies on: others launch by themselves.
KNOWN_RELEASES = ("3.6.", "3.7.", "3.8.", "3.9.")

# Options that a kernel in a graph can have: what Inductor reads from a `triton.Config`.
GRAPH_OPTIONS = frozenset({"num_warps", "num_stages"})

# Triton 3.10 stops fusing multiplications with additions unless it is asked to; 3.6 to 3.9 fuse by default. Graphs have
# no place for this option: there the default holds.
PINNED_OPTIONS = {"enable_fp_fusion": True}

# For sums of products of which a thread has one, and a copy of the sum: if each fused its own product into the sum, the
# copies would differ, and which one they store for all is undefined. In a graph, the operator stays a call.
UNFUSED = MappingProxyType({"enable_fp_fusion": False})

# A kernel in a graph goes without a bound on registers, which changes no result.
_DISPENSABLE_OPTIONS = frozenset({"maxnreg"})

# Integers of at most this size are 32 bits wide to Triton, and AMD's backend addresses storages of at most this many
# bytes with 32-bit offsets.
MAX_INT32 = 2**31 - 1

_driver: Any = driver
_runtime = knobs.runtime

# The watchers of launches, outermost first, None for a graph: whether it takes the launch's place, and the thread
# whose launches a graph takes.
_watchers: tuple[tuple[Callable | None, bool, int | None], ...] = ()
_num_recording = 0
_lock = threading.Lock()
_thread = threading.local()


@contextlib.contextmanager
def _watching(callback: Callable | None, replaces: bool, thread: int | None = None) -> Iterator[None]:
    global _watchers
    entry = (callback, replaces, thread)
    with _lock:
        _watchers = (*_watchers, entry)
    try:
        yield
    finally:
        with _lock:
            # Contexts of several threads may end in any order.
            _watchers = tuple(other for other in _watchers if other is not entry)


def intercept(callback: Callable[[Kernel, Any, tuple, dict[str, Any]], Any]) -> contextlib.AbstractContextManager[None]:
    """Context in which `callback(kernel, grid, args, constants)` takes the place of every launch of the process.

    Contexts nest: the innermost sees a launch first, and one outside an `intercept` does not see it at all. The
    callback is given the `Kernel`, the grid, the positional arguments, and the keyword arguments (compile-time
    constants and options such as `num_warps`); what it raises passes through the launcher.
    """
    return _watching(callback, replaces=True)


def observe(callback: Callable[[Kernel, Any, tuple, dict[str, Any]], Any]) -> contextlib.AbstractContextManager[None]:
    """Context in which `callback` is called, as by `intercept`, before every launch of the process."""
    return _watching(callback, replaces=False)


def tracing() -> contextlib.AbstractContextManager[None]:
    """Context in which launches of this thread become nodes of the graph that torch is tracing.

    Nothing is launched then, and no watcher of launches is called.
    """
    return _watching(None, replaces=True, thread=threading.get_ident())


def is_tracing() -> bool:
    """Whether launches of this thread become nodes of a graph (see `tracing`)."""
    return bool(_watchers) and any(
        callback is None and thread == threading.get_ident() for callback, _, thread in _watchers
    )


class DirectLaunch(NamedTuple):
    """A launch without Triton's own look-up: `run(*args, stream=stream)`, all arguments, constants too.

    Pointers may be integers. If anything is in the hooks, Triton would call it before launches of this kernel.
    """

    device: int
    run: Callable[..., None]
    args: tuple
    hooks: list


@contextlib.contextmanager
def recording(note: Callable[[DirectLaunch | None], None]) -> Iterator[None]:
    """Context in which `note` is told of every launch of this thread, with None if it was not a direct one."""
    global _num_recording
    with _lock:
        _num_recording += 1
    _thread.note = note
    try:
        yield
    finally:
        _thread.note = None
        with _lock:
            _num_recording -= 1


def are_launches_seen() -> bool:
    """Whether somebody watches, traces, records or inspects launches, so that each has to go through its `Kernel`."""
    is_recording = _num_recording and getattr(_thread, "note", None) is not None
    return bool(_watchers or is_recording or _runtime.add_stages_inspection_hook)


class UntraceableLaunchError(NotImplementedError):
    """A launch that cannot become a node of a graph."""


class Kernel:
    """A Triton kernel, launched as Triton's own are: `kernel[grid](*args, **constants_and_options)`.

    Parameters that are pointers have names that end in `_ptr`, constants are annotated, all others are numbers.

    In the interpreter this is the function that `triton.jit` makes. On a GPU the compiled kernel comes from a
    dictionary; `key_function` says what of a launch selects it. Triton itself launches what is not in there yet, and
    what is unusual: run-time arguments by keyword or of other types, grids that are functions, kernels and compilers
    with hooks that have to see every launch. It launches everything where it is not one of the `KNOWN_RELEASES`.
    `TRITON_DEBUG` and its like are read when a kernel is compiled.

    Args:
        function: The kernel's source, a function for `triton.jit`.
        unspecialized: Names of integer arguments whose values the compiler may not look at, so that another value
            compiles nothing.
        unaligned: Names of those of which it may not see whether they are multiples of 16.

    Attributes:
        function: The result of `triton.jit` for it.
        argument_names: Of all parameters, in their order.
        run_time_names: Of those that are not constants.
    """

    def __init__(
        self, function: Callable, unspecialized: Collection[str] = (), unaligned: Collection[str] = ()
    ) -> None:
        names = function.__code__.co_varnames[: function.__code__.co_argcount]
        free = [name for name in names if name in unspecialized]
        self.function: Any = triton.jit(do_not_specialize=free, do_not_specialize_on_alignment=[*unaligned])(function)
        self.__name__, self.__qualname__ = function.__name__, function.__qualname__
        self.__module__, self.__doc__ = function.__module__, function.__doc__
        self.argument_names = names
        constants = {name for name, kind in function.__annotations__.items() if "constexpr" in str(kind)}
        self.run_time_names = tuple(name for name in names if name not in constants)
        self._key = None
        if not INTERPRETED and triton.__version__.startswith(KNOWN_RELEASES):
            self._key = key_function(self.function.params, bool(torch.version.hip))
        self._compiled: dict[Any, tuple[CompiledKernel, tuple]] = {}
        self._configured: dict[tuple, Any] = {}

    def __repr__(self) -> str:
        return f"Kernel({self.__module__}.{self.__qualname__})"

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        """The launch on `grid`: one to three numbers of programs."""
        return lambda *args, **constants: self._launch(grid, args, constants)

    def warmup(self, *args: Any, grid: Any, **constants: Any) -> Any:
        """Compile for these arguments as Triton does, without launching; returns Triton's compiled kernel."""
        return self.function.warmup(*args, grid=grid, **{**PINNED_OPTIONS, **constants})

    def _launch(self, grid: Any, args: tuple, constants: dict[str, Any]) -> None:
        launch = None
        if not (_watchers and self._taken_over(grid, args, constants)):
            launch = self._launch_directly(grid, args, constants)
        if _num_recording and (note := getattr(_thread, "note", None)) is not None:
            note(launch)

    def _launch_directly(self, grid: Any, args: tuple, constants: dict[str, Any]) -> DirectLaunch | None:
        """Launch what was compiled before; otherwise Triton launches and None is returned."""
        if self._key is None or callable(grid) or self.function.pre_run_hooks or _runtime.add_stages_inspection_hook:
            self._launch_by_triton(grid, args, constants)
            return None
        try:
            active = _driver.active
            device = active.get_current_device()
            described = self._key(*args)
        except (AttributeError, TypeError):
            self._launch_by_triton(grid, args, constants)
            return None
        key = (device, *described, *constants, *constants.values())
        found = self._compiled.get(key)
        if found is None:
            self._launch_first(key, grid, args, constants)
            return None
        compiled, rest = found
        launch = DirectLaunch(device, compiled[(*grid, 1, 1)[:3]], (*args, *rest), self.function.pre_run_hooks)
        launch.run(*launch.args, stream=active.get_current_stream(device))
        return launch

    def _launch_by_triton(self, grid: Any, args: tuple, constants: dict[str, Any]) -> Any:
        return self.function[grid](*args, **{**PINNED_OPTIONS, **constants})

    def _taken_over(self, grid: Any, args: tuple, constants: dict[str, Any]) -> bool:
        if is_tracing():
            self._trace(grid, args, constants)
            return True
        for callback, replaces, _ in reversed(_watchers):
            if callback is None:
                continue
            callback(self, grid, args, constants)
            if replaces:
                return True
        return False

    def _launch_first(self, key: tuple, grid: Any, args: tuple, constants: dict[str, Any]) -> None:
        """Let Triton compile and launch, and remember under `key` what it launched, with what follows `args`."""
        compiled = self._launch_by_triton(grid, args, constants)
        # A hook may have refused to compile, or left it to another thread.
        if isinstance(compiled, CompiledKernel):
            self._compiled[key] = compiled, tuple(self._all_constants(len(args), constants).values())

    def _all_constants(self, num_args: int, constants: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters that `num_args` positional arguments leave, with their defaults where they are not given."""
        defaults = {p.name: p.default for p in self.function.params[num_args:] if p.has_default}
        return {p.name: {**defaults, **constants}[p.name] for p in self.function.params[num_args:]}

    def _trace(self, grid: Any, args: tuple, constants: dict[str, Any]) -> None:
        """Put the launch into the graph that is being traced."""
        arguments = self._all_constants(len(args), constants)
        options = {name: constants[name] for name in constants.keys() - arguments.keys() - _DISPENSABLE_OPTIONS}
        if not GRAPH_OPTIONS.issuperset(options):
            raise UntraceableLaunchError(f"{self.__name__}: graphs have no options {sorted(options)}.")
        if any(isinstance(value, tuple) for value in (*args, *arguments.values())):
            raise UntraceableLaunchError(f"{self.__name__}: torch cannot tell what a kernel writes that takes tuples.")
        configured = self._with_options(options)
        torch.library.wrap_triton(configured)[grid](*args, **arguments)

    def _with_options(self, options: dict[str, Any]) -> Any:
        """The function with its options in a `triton.Config`, the only place where graphs look for all of them."""
        key = tuple(sorted(options.items()))
        if key not in self._configured:
            config = triton.Config({}, **options)
            self._configured[key] = triton.autotune(configs=[config], key=[])(self.function)
        return self._configured[key]


# Integers that follow the batch size: specializing on them would compile anew for another one. The alignment
# of strides reaches the kernels as a compile-time constant.
BATCH_DEPENDENT = {
    *("num_rows", "segment_rows", "num_samples", "num_spatial", "num_splits", "num_parts", "num_blocks"),
    *("num_resident", "part_tiles", "count", "momentum_low", "momentum_high"),
    *("num_stream_rows", "last_dropped", "scale_low", "scale_high"),
}


def batch_independent_jit(function: Callable) -> Kernel:
    """Decorator for a kernel that is never compiled anew for integer arguments which change with the batch."""
    return _free_of(function, lambda name: name in BATCH_DEPENDENT or name.endswith(("_segment_stride", "_row_stride")))


def stride_independent_jit(function: Callable) -> Kernel:
    """`batch_independent_jit` that never specializes any stride either.

    The compiler's facts on strides, for wide loads, reach such a kernel as compile-time constants.
    """
    return _free_of(function, lambda name: name in BATCH_DEPENDENT or name.endswith("_stride"))


def aligned_by_constants_jit(function: Callable) -> Kernel:
    """`batch_independent_jit` that learns of multiples from constants alone: of no stride by its value.

    A plan knows what lies in one access of a thread, which the compiler might widen: a stride of 0 is a multiple of 16.
    """
    return _free_of(function, BATCH_DEPENDENT.__contains__, lambda name: name.endswith("_stride"))


def unspecialized_jit(function: Callable) -> Kernel:
    """Decorator for a kernel that is never compiled anew for another value of an integer argument."""
    return _free_of(function, lambda name: name.islower() and not name.endswith("_ptr"))


def _free_of(
    function: Callable, is_free: Callable[[str], bool], is_unaligned: Callable[[str], bool] = lambda name: False
) -> Kernel:
    names = [*inspect.signature(function).parameters]
    return Kernel(function, [*filter(is_free, names)], [*filter(is_unaligned, names)])


def key_function(parameters: Sequence[Any], offsets_matter: bool) -> Callable[..., tuple]:
    """Build `(*args) -> key`: what of positional arguments the compiler can have taken into account.

    Of a tensor that is its dtype and whether its address is a multiple of 16, of a specialized integer whether it is 1
    or a multiple of 16, of a constant its value, and of every other number its type. Constants that compare equal are
    one, as they are to Triton.

    With `offsets_matter`, the backend also asks if 32-bit offsets reach all of a tensor's storage. The function raises
    `TypeError` where an argument is missing that is not a constant, or is of a type that it does not know.
    """
    num_needed = max((p.num + 1 for p in parameters if not p.is_constexpr), default=0)
    needed = parameters[:num_needed]
    small, types, parts = ["True"], [], []
    for p in needed:
        is_int32 = f"{p.name}.__class__ is int and -{MAX_INT32} <= {p.name} <= {MAX_INT32}"
        if p.is_constexpr:
            parts.append(p.name)
        elif p.name.endswith("_ptr"):
            parts.append(f"None if {p.name} is None else {p.name}.dtype")
            parts.append(f"{p.name} is None or {p.name}.data_ptr() % 16 == 0")
            if offsets_matter:
                parts.append(f"{p.name} is None or {p.name}.untyped_storage().nbytes() <= {MAX_INT32}")
        elif p.do_not_specialize:
            small.append(is_int32)
            types.append(f"type_of({p.name}), ")
        else:
            parts.append(f"({p.name} == 1 or {p.name} % 16 == 0 and 16) if {is_int32} else known_of({p.name})")
    parts.append(f"{' and '.join(small)} or ({''.join(types)})")
    arguments = "".join(f"{p.name}, " for p in needed)
    source = f"lambda {arguments}*constants: ({', '.join(parts)}, *constants)"
    # Written out, because a loop over the arguments takes longer than the compiled kernel takes to launch.
    return eval(source, {"type_of": _type_of, "known_of": _known_of})


def _type_of(value: Any) -> Any:
    """The type that Triton gives to a number, or to a tuple of them, for each a different value."""
    if value.__class__ is int:
        return 32 if -MAX_INT32 - 1 <= value <= MAX_INT32 else 64 if value < 2**63 else "unsigned"
    if value.__class__ is tuple:
        return tuple(map(_type_of, value))
    if value is None or value.__class__ in (float, bool):
        return value.__class__
    raise TypeError(f"A launch with an argument of type {type(value).__name__} has no key.")


def _known_of(value: Any) -> Any:
    """The type of a specialized number, or tuple of them, and what else Triton looks at."""
    if value.__class__ is tuple:
        return tuple(map(_known_of, value))
    if value.__class__ is int:
        return _type_of(value), value == 1 or (value % 16 == 0 and 16)
    return _type_of(value)
