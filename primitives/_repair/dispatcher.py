"""Kernels of ours for operators of torch, and who else has some there."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import _C

from primitives._core.contexts import run_as_written

__all__ = ["DEVICES", "NAMESPACES", "Registrations", "has_kernel"]

DEVICES = ("CPU", "CUDA")
# Those of torch's own operators.
NAMESPACES = ("aten", "torch_nn")
_KERNEL = re.compile(r"^(?:Autograd)?(?:CPU|CUDA): registered at (.*\.py):\d+", re.MULTILINE)
_OURS, _TORCHS = Path(__file__).parents[1], Path(torch.__file__).parent


# Whether an operator, `"aten::det"`, has a kernel of its own for a dispatch key.
has_kernel = _C._dispatch_has_kernel_for_dispatch_key


class Registrations:
    """Kernels of operators, as long as this has not been taken back."""

    def __init__(self) -> None:
        self._libraries: list[torch.library.Library] = []
        self._names: set[str] = set()
        self._noticed: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._libraries)

    def add(self, kernels: Iterable[tuple[str, str, Callable[[Callable[..., Any]], Callable[..., Any]]]]) -> None:
        """Register kernels, each as the name of an operator, a dispatch key, and a function of torch's own kernel."""
        libraries, names = {space: torch.library.Library(space, "IMPL") for space in NAMESPACES}, set()
        with warnings.catch_warnings():
            # Torch's own, where another package has a kernel: `warn_of_others` names it.
            warnings.simplefilter("ignore")
            for name, key, make in kernels:
                parsed: Any = _C._parse_dispatch_key(key)
                kernel = run_as_written(make(torch.library.get_kernel(name, parsed).call_boxed))
                space, _, operator = name.partition("::")
                libraries[space].impl(operator, kernel, key, with_keyset=True, allow_override=True)
                names.add(name)
        self._libraries, self._names = [*libraries.values()], names
        self._forget_lookups()

    def warn_of_others(self, names: Iterable[str], stacklevel: int) -> None:
        """Name packages that have kernels for operators, each once."""
        files = {path for name in names for path in _KERNEL.findall(_C._dispatch_dump(name))}
        others = {path for path in files if not {_OURS, _TORCHS} & {*Path(path).parents}} - self._noticed
        if others:
            self._noticed |= others
            warnings.warn(
                f"repair_torch: {', '.join(sorted(others))} registered kernels for operators that this repairs. The "
                "kernel that was registered last runs: call repair_torch after the other package.",
                RuntimeWarning,
                stacklevel=stacklevel + 1,
            )

    def take_back(self) -> None:
        """Leave torch's operators as they were."""
        if self._libraries:
            for library in self._libraries:
                library._destroy()
            self._libraries = []
            self._forget_lookups()

    def _forget_lookups(self) -> None:
        """Have tracers look the kernels of these operators up again, which they keep by operator."""
        for name in self._names:
            space, _, operator = name.partition("::")
            packet, _, overload = operator.partition(".")
            getattr(getattr(getattr(torch.ops, space), packet), overload or "default")._dispatch_cache.clear()
