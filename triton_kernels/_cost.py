"""The cost of a call of a launcher, and the account that its launches keep while somebody counts."""

from __future__ import annotations

import contextlib
import math
import threading
from collections import Counter
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor


class Sweep(NamedTuple):
    """Second reads of rows that programs sweep twice.

    Attributes:
        num_bytes: Bytes that are read again.
        num_programs: Programs that sweep their share twice, each for itself; 1 where the second sweep is a launch of
            its own, which begins when the first one has ended.
    """

    num_bytes: int
    num_programs: int


@dataclass(frozen=True)
class Cost:
    """Bytes and launches of one call of a launcher.

    Attributes:
        bytes_read: Operands that the wanted results take, each counted once.
        bytes_written: Results, each counted once.
        bytes_moved: Bytes that the plan moves to and from memory: every pass over an operand, the elements of an
            expanded one as often as they stand for another, and partial results written and read. Bytes read again
            may come from a cache; this counts them as if none did.
        bytes_reread: Parameters, statistics and coefficients that further programs read again, beside `bytes_moved`,
            and what of attention they sweep again: few bytes many times over, which the caches of a GPU serve.
        launches: Kernels launched.
        sweeps: The part of `bytes_moved` that programs read a second time: a cache that holds their rows serves it.
        loads: Name of each full-size operand and all bytes that are loaded from it, those that are read again too.
        matmuls: Products of matrices of a tile, in all kernels together.
        tile_matmuls: The same in all tiles.
        flops: Multiplications and additions of all of them, of whole tiles.
    """

    bytes_read: int
    bytes_written: int
    bytes_moved: int
    bytes_reread: int
    launches: int
    sweeps: tuple[Sweep, ...] = ()
    loads: tuple[tuple[str, int], ...] = ()
    matmuls: int = 0
    tile_matmuls: int = 0
    flops: int = 0

    @property
    def minimum_bytes(self) -> int:
        """Bytes that the op cannot do without: every operand read once, every result written once."""
        return self.bytes_read + self.bytes_written

    def __add__(self, other: Cost) -> Cost:
        """Cost of two calls, one after the other."""
        return Cost(*(getattr(self, field.name) + getattr(other, field.name) for field in fields(self)))


class Account:
    """Sums a `Cost` up, kernel by kernel; operands go by name, so that each counts once as an operand."""

    def __init__(self) -> None:
        """Start at nothing."""
        # Bytes of operands of full size and of small ones, and all that is loaded of the former, by name.
        self._operands: dict[str, int] = {}
        self._shared: dict[str, int] = {}
        self._loads: Counter[str] = Counter()
        self._totals: Counter[str] = Counter()
        self._sweeps: list[Sweep] = []

    def load(self, passes: int = 1, /, **operands: Tensor | None) -> None:
        """Count `passes` over full-size operands; one that is None is not there."""
        for name, tensor in operands.items():
            if tensor is not None and passes:
                self._operands[name] = own_bytes(tensor)
                self._loads[name] += tensor.nbytes * passes
                self.write(tensor.nbytes * passes)

    def load_often(self, name: str, tensor: Tensor | None, nbytes: int) -> None:
        """Count `nbytes` of loads of a small operand, by all programs together."""
        if tensor is not None and nbytes:
            self._shared[name] = own_bytes(tensor)
            self.reload(nbytes)

    def load_tiles(self, operand: str | None, own: int, loaded: int) -> None:
        """Count a sweep that loads tiles, `loaded` bytes in all, of `own` bytes in memory; None for no operand."""
        self.write(own)
        self.reload(loaded - own)
        if operand is not None:
            self._operands[operand] = max(own, self._operands.get(operand, 0))
            self._loads[operand] += loaded

    def reload(self, nbytes: int, operand: str | None = None) -> None:
        """Count loads of what is small: results and coefficients of an earlier kernel, or a part of an operand."""
        self._totals["reloaded"] += nbytes
        if operand is not None:
            self._loads[operand] += nbytes

    def store(self, nbytes: int) -> None:
        """Count a result of `nbytes`."""
        self._totals["stored"] += nbytes
        self.write(nbytes)

    def scratch(self, nbytes: int) -> None:
        """Count partial results of `nbytes`, written by one kernel and read by the next."""
        self.write(2 * nbytes)

    def write(self, nbytes: int) -> None:
        """Count bytes that move, and belong to no operand or result."""
        self._totals["moved"] += nbytes

    def multiply(self, matmuls: int, num_tiles: int, flops: int) -> None:
        """Count products of matrices: of each tile so many, `flops` in all."""
        self._totals.update(matmuls=matmuls, tile_matmuls=matmuls * num_tiles, flops=flops)

    def sweep(self, nbytes: int, num_programs: int) -> None:
        """Note that `nbytes` of what was counted are second reads of swept rows (see `Sweep`)."""
        if nbytes:
            self._sweeps.append(Sweep(nbytes, num_programs))

    def cost(self, launches: int) -> Cost:
        """The sum, of so many launches."""
        totals, shared = self._totals, sum(self._shared.values())
        return Cost(
            bytes_read=sum(self._operands.values()) + shared,
            bytes_written=totals["stored"],
            bytes_moved=totals["moved"] + shared,
            bytes_reread=totals["reloaded"] - shared,
            launches=launches,
            sweeps=tuple(self._sweeps),
            loads=tuple(self._loads.items()),
            **{name: totals[name] for name in ("matmuls", "tile_matmuls", "flops")},
        )


class Tensors(NamedTuple):
    """Tensors of a call, by id: those it was given, those it returned, and those that its kernels have made so far."""

    given: set[int]
    returned: set[int]
    made: set[int]


_thread = threading.local()


@contextlib.contextmanager
def counting() -> Iterator[Account]:
    """Context in which what this thread launches is counted; somebody else has to keep it from being launched."""
    outer = current_account()
    _thread.account = account = Account()
    try:
        yield account
    finally:
        _thread.account = outer


def current_account() -> Account | None:
    """The account of this thread's launches; None where launches are not counted."""
    return getattr(_thread, "account", None)


def own_bytes(tensor: Tensor) -> int:
    """Bytes of the elements that are there, of which those along an expanded dim are one."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(sizes) * tensor.element_size()
