"""Choices of tuning, kept in a file between processes."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import threading
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .planned import Request, forget_plans

# A file of another layout is not read.
FORMAT = 1


def cache_path() -> Path:
    """The file: in `PRIMITIVES_CACHE_DIR` if that is set, else in the user's cache folder."""
    folder = os.environ.get("PRIMITIVES_CACHE_DIR")
    if folder:
        return Path(folder) / "launch_plans.json"
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "torch-training-primitives" / "launch_plans.json"


class Store:
    """Choices by environment (chip, device, software) and request."""

    def __init__(self, path: Path) -> None:
        """Read what is at `path`, if anything."""
        self._path = path
        self._lock = threading.Lock()
        self._entries = _read(path)

    def find(self, environment: str, request: Request) -> Any | None:
        """The plan chosen for a request, if there is one and it was chosen over the same default."""
        entry = self._entries.get(environment, {}).get(str(request.key))
        if entry is None or entry["default"] != asdict(request.default):
            return None
        plans = (request.default, *request.candidates())
        return next((plan for plan in plans if asdict(plan) == entry["chosen"]), None)

    def keep(self, environment: str, request: Request, chosen: Any, default_time: float, chosen_time: float) -> None:
        """Answer a request with this plan from here on; times are milliseconds of the launcher."""
        plans = {"default": asdict(request.default), "chosen": asdict(chosen)}
        with self._lock:
            of_environment = self._entries.setdefault(environment, {})
            of_environment[str(request.key)] = {**plans, "default_ms": default_time, "chosen_ms": chosen_time}
        forget_plans()

    def save(self) -> None:
        """Add the choices to the file. Where another process was first, its choice stays, and is taken over."""
        with self._lock:
            for environment, entries in _read(self._path).items():
                mine = self._entries.setdefault(environment, {})
                mine.update({key: e for key, e in entries.items() if mine.get(key, e)["default"] == e["default"]})
            try:
                _write(self._path, {"format": FORMAT, "choices": self._entries})
            except OSError as error:
                warnings.warn(f"Tuned launch plans are not kept: {error}", stacklevel=2)
        forget_plans()

    def table(self) -> Iterator[str]:
        """Lines that show the choices beside the default plans."""
        if not any(self._entries.values()):
            yield f"No tuned launch plans in {self._path}"
            return
        yield f"Tuned launch plans in {self._path}"
        for environment, entries in sorted(self._entries.items()):
            yield f"\n{environment}"
            for key, entry in sorted(entries.items()):
                gain = entry["default_ms"] / entry["chosen_ms"] if entry["chosen_ms"] else 1.0
                yield f"  {key}"
                yield f"    {entry['default_ms']:.4f} ms -> {entry['chosen_ms']:.4f} ms, {gain:.2f} x"
                chosen, default = entry["chosen"], entry["default"].items()
                changes = ", ".join(
                    f"{name} {value} -> {chosen[name]}" for name, value in default if chosen[name] != value
                )
                yield f"    {changes or 'the default plan'}"


def _read(path: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Choices in a file; none, with a warning, if it is not one that `_write` has written."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            return {}
        for entries in content["choices"].values():
            for entry in entries.values():
                dict(entry["default"], **entry["chosen"])
                float(entry["default_ms"] + entry["chosen_ms"])
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        warnings.warn(f"The tuned launch plans in {path} cannot be read and are ignored: {error!r}", stacklevel=2)
        return {}
    return content["choices"]


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=1, sort_keys=True)
        # Another process sees the file as it was or as it is, never a part of it.
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise
