"""Lists of exceptions, `KNOWN_...` of a module: which of their entries are needed no more, or not so much of.

A list is a dict of bounds, or a tuple of entries: the pattern of a name, and the reason.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import ModuleType


class Check(NamedTuple):
    """Something that is held to rules: its name, as patterns match it, its shape, and what is wrong with it now."""

    name: str
    shape: str
    problems: Callable[[], list[str]]


def needless(module: ModuleType, checks: Iterable[Check]) -> list[str]:
    """Entries without which nothing more is wrong, or not with each shape, or that allow `MARGIN` more, in words."""
    checks, found = list(checks), []
    lists = {name: known for name, known in vars(module).items() if name.startswith("KNOWN_")}
    now = {check: check.problems() for check in checks}

    def broken(among: Iterable[Check], **changed: Any) -> list[Check]:
        with mock.patch.multiple(module, **changed):
            return [check for check in among if check.problems() != now[check]]

    excused = broken(checks, **{name: type(known)() for name, known in lists.items()})
    for name, known in lists.items():
        here, left = broken(excused, **{name: type(known)()}), checks
        for entry, without, lowered in _changed(known, module.MARGIN):
            if isinstance(known, dict):
                idle = set[str]()
            else:
                # Of entries that fit a name the first one counts.
                idle = {check.shape for check in left if re.match(entry, check.name)}
                left = [check for check in left if not re.match(entry, check.name)]
            needing = broken(here, **{name: without})
            idle -= {check.shape for check in needing}
            if idle or not needing:
                found.append(f"{name} {entry!r}: leave out {', '.join(sorted(idle)) or 'it'}")
            elif lowered is not None and not broken(needing, **{name: lowered}):
                found.append(f"{name} {entry!r}: allow no more than {module.MARGIN} above what is needed")
    return found


def _changed(known: Any, margin: float) -> Iterator[tuple[Any, Any, Any]]:
    """Each key or pattern of a list, the list without its entry, and with its bound lower, or None if it has none."""
    if isinstance(known, dict):
        for key, bound in known.items():
            yield key, {other: each for other, each in known.items() if other != key}, known | {key: bound - margin}
        return
    for number, (pattern, _) in enumerate(known):
        yield pattern, (*known[:number], *known[number + 1 :]), None
