"""A Triton driver for a chip that is not there: it answers up to the point where a compiled kernel would be loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from triton_kernels.launch.chips import CHIPS

if TYPE_CHECKING:
    from triton.backends.compiler import GPUTarget

# Registers that one thread can have. A compute unit of AMD has four register files of 512 registers for each lane, of
# which a wavefront sees one.
MAX_REGISTERS = {"sm_80": 255, "sm_90": 255, "sm_100": 255, "gfx942": 512}


def is_amd(chip_name: str) -> bool:
    """Whether the chip is one of AMD's."""
    return chip_name.startswith("gfx")


class StandInDriver:
    """Stands in for the driver of the chip `CHIPS[chip_name]`."""

    def __init__(self, chip_name: str) -> None:
        """Answer for one chip."""
        self._chip_name = chip_name
        self._chip = CHIPS[chip_name]
        # Triton keeps compiled kernels per device number, so that each chip needs its own.
        self._device = list(CHIPS).index(chip_name)
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        """Target that Triton compiles for."""
        from triton.backends.compiler import GPUTarget

        if is_amd(self._chip_name):
            return GPUTarget("hip", self._chip_name, self._chip.warp_size)
        return GPUTarget("cuda", int(self._chip_name.removeprefix("sm_")), self._chip.warp_size)

    def get_device_properties(self, device: int) -> dict[str, int]:
        """Limits that Triton checks a compiled kernel against."""
        return {
            "max_shared_mem": self._chip.shared_bytes,
            "multiprocessor_count": self._chip.num_processors,
            "warpSize": self._chip.warp_size,
            "max_num_regs": self._chip.registers,
        }

    def get_current_device(self) -> int:
        """Number of the device, one per chip."""
        return self._device

    def get_current_stream(self, device: int) -> int:
        """Handle of the default stream."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Device of the tensors that the launchers are given."""
        return torch.device("cpu")

    def is_active(self) -> bool:
        """Whether the driver can be used: always."""
        return True


def activate(chip_name: str) -> Any:
    """Make a stand-in for the chip Triton's active driver, and return it."""
    import triton

    driver = StandInDriver(chip_name)
    triton.runtime.driver.set_active(driver)  # pyright: ignore[reportArgumentType] - it quacks
    return driver
