"""Triton's interpreter prepares its language once per launch.

To interpret a kernel, it replaces the functions of `triton.language`; it does so again for every call of a device
function, which changes nothing any more and takes a third of the time of the launches here.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import triton.language as tl

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["patch_once"]


class _NoChanges:
    """What there is to restore where nothing was replaced."""

    def restore(self) -> None:
        """Nothing."""


def patch_once(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The interpreter's function that replaces the language for a kernel, without what is in force already.

    Args:
        patch: `triton.runtime.interpreter._patch_lang`. It returns an object with a method `restore`, which the
            interpreter calls when a launch ends, and never for device functions.
    """
    in_force: set[int] = set()

    def patched(function: Any) -> Any:
        modules = {id(value) for value in function.__globals__.values() if inspect.ismodule(value)}
        needed = modules & {id(tl), id(tl.core)}
        if in_force and needed <= in_force:
            return _NoChanges()
        changes = patch(function)
        if not in_force:
            restore = changes.restore

            def restore_all() -> None:
                in_force.clear()
                restore()

            changes.restore = restore_all
        in_force.update(needed)
        return changes

    return patched
