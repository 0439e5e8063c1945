"""A Triton driver without a GPU: compiles for sm_90, and records what would be launched with which arguments."""

from __future__ import annotations

from typing import Any

import triton

from perf.machine_code.compiling import StandInDriver

# Triton asks for these when it loads a kernel.
HANDLE, NUM_REGISTERS, NUM_SPILLS, MAX_THREADS = 1, 32, 0, 1024


class RecordingDriver(StandInDriver):
    """Stands in for the driver of one sm_90 device that also loads and launches.

    Attributes:
        launches: `(hash of the compiled kernel, grid, stream, arguments)` of every launch.
        device: Number of the current device; tests set it.
    """

    def __init__(self) -> None:
        """Stand in for a driver that has launched nothing."""
        super().__init__("sm_90")
        self.launches: list[tuple] = []
        self.device = 0

    def launcher_cls(self, source, metadata):
        """What Triton calls to launch one compiled kernel."""

        def launch(x, y, z, stream, function, packed, launch_metadata, enter_hook, exit_hook, *args):
            if enter_hook is not None:
                enter_hook(launch_metadata)
            self.launches.append((metadata.hash, (x, y, z), stream, args))
            if exit_hook is not None:
                exit_hook(launch_metadata)

        return launch

    def load_binary(self, name, binary, shared_bytes, device):
        """Module, function, registers, spills and threads of a kernel that was loaded."""
        return HANDLE, HANDLE, NUM_REGISTERS, NUM_SPILLS, MAX_THREADS

    def unload_module(self, module):
        """Forget a kernel: nothing was loaded."""

    def get_current_device(self):
        """Number of the device in use."""
        return self.device

    def get_current_stream(self, device):
        """Handle of a stream, one per device."""
        return 100 + device


def activate() -> RecordingDriver:
    """Make a new recording driver Triton's driver."""
    driver = RecordingDriver()
    config: Any = triton.runtime.driver
    config.set_active(driver)
    return driver
