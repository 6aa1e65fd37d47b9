"""Peak speeds of common devices, from their makers' data sheets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from netsim.files.errors import InputError, unknown_name

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DEFAULT_DEVICE", "DEVICES", "Device", "find_device"]

DEFAULT_DEVICE = "a100"
"""The device of hosts whose topology names none."""


@dataclass(frozen=True)
class Device:
    """A device by its peak dense speed.

    Attributes:
        flops: operations a second by dtype, multiply and add counted as two; no structured sparsity, matrix
            units where the dtype has them, and for half precision the rate with fp32 accumulation.
        source: where the figures are published. Processors' are cores x base clock x operations a cycle.
    """

    flops: Mapping[str, float]
    source: str

    def flops_for(self, dtype: str, name: str) -> float:
        """Peak operations a second in `dtype`; a half precision the device lacks runs as fp32.

        Raises:
            UnknownNameError: no device here computes in `dtype`.
        """
        if dtype in self.flops:
            return self.flops[dtype]
        if dtype not in _DTYPES:
            raise unknown_name(f"dtype of device {name}", dtype, self.flops)
        return self.flops["fp32"]


_DTYPES = ("fp32", "tf32", "bf16", "fp16")


def _device(source: str, **teraflops: float) -> Device:
    return Device({dtype: speed * 1e12 for dtype, speed in teraflops.items()}, source)


def _processor(source: str, cores: int, gigahertz: float, per_cycle: int) -> Device:
    return Device({"fp32": cores * gigahertz * 1e9 * per_cycle}, source)


_AVX2 = 32  # two 256-bit fused multiply-adds a cycle: 2 x 8 lanes x 2
_AVX512 = 64  # two 512-bit ones
_NEON = 16  # two 128-bit ones

DEVICES: dict[str, Device] = {
    # data centres
    "h200": _device("NVIDIA H200 data sheet", fp32=67.0, tf32=494.5, bf16=989.5, fp16=989.5),
    "h100": _device("NVIDIA H100 SXM data sheet", fp32=67.0, tf32=494.5, bf16=989.5, fp16=989.5),
    "h100-pcie": _device("NVIDIA H100 PCIe data sheet", fp32=51.0, tf32=378.0, bf16=756.5, fp16=756.5),
    "a100": _device("NVIDIA A100 data sheet", fp32=19.5, tf32=156.0, bf16=312.0, fp16=312.0),
    "a10": _device("NVIDIA A10 data sheet", fp32=31.2, tf32=62.5, bf16=125.0, fp16=125.0),
    "l4": _device("NVIDIA L4 data sheet", fp32=30.3, tf32=60.0, bf16=121.0, fp16=121.0),
    "l40s": _device("NVIDIA L40S data sheet", fp32=91.6, tf32=183.0, bf16=362.0, fp16=362.0),
    "v100": _device("NVIDIA V100 SXM2 data sheet", fp32=15.7, fp16=125.0),
    "t4": _device("NVIDIA T4 data sheet", fp32=8.1, fp16=65.0),
    "mi300x": _device("AMD Instinct MI300X data sheet", fp32=163.4, tf32=653.7, bf16=1307.4, fp16=1307.4),
    "mi250x": _device("AMD Instinct MI250X data sheet", fp32=47.9, bf16=383.0, fp16=383.0),
    # desktops
    "rtx-5090": _device("NVIDIA RTX Blackwell architecture paper", fp32=104.8, bf16=209.5, fp16=209.5),
    "rtx-4090": _device("NVIDIA Ada architecture paper", fp32=82.6, tf32=82.6, bf16=165.2, fp16=165.2),
    "rtx-3090": _device("NVIDIA GA102 architecture paper", fp32=35.6, tf32=35.6, bf16=71.2, fp16=71.2),
    "rtx-2080-ti": _device("NVIDIA Turing architecture paper", fp32=13.4, fp16=53.8),
    # laptops (their graphics units)
    "m1": _device("Apple, M1 announcement, 2020", fp32=2.6),
    "m1-max": _device("Apple, M1 Max announcement, 2021", fp32=10.4),
    "m2": _device("Apple, M2 announcement, 2022", fp32=3.6),
    # processors
    "epyc-7763": _processor("AMD EPYC 7763 specification, AVX2", 64, 2.45, _AVX2),
    "xeon-8480": _processor("Intel Xeon Platinum 8480+ specification, AVX-512", 56, 2.0, _AVX512),
    "ryzen-7-5800u": _processor("AMD Ryzen 7 5800U specification, AVX2", 8, 1.9, _AVX2),
    "core-i7-1165g7": _processor("Intel Core i7-1165G7 specification, AVX2", 4, 2.8, _AVX2),
    "raspberry-pi-5": _processor("Raspberry Pi 5 specification, Cortex-A76", 4, 2.4, _NEON),
    "cpu-core": _processor("one core at 3 GHz with AVX2, for what-if questions", 1, 3.0, _AVX2),
}
"""Devices by name."""


def find_device(name: str, where: str = "") -> Device:
    """The device of this name, however it is spelt ("RTX 4090" is "rtx-4090").

    Args:
        name: as a user wrote it.
        where: prefix of the error's line, such as "host us.0: ".

    Raises:
        UnknownNameError: no such device; the line lists them, the likeliest first.
    """
    if not isinstance(name, str):
        raise InputError(f"{where}device {name!r} is no name; write one such as {DEFAULT_DEVICE}")
    plain = name.strip().lower().replace(" ", "-").replace("_", "-")
    if plain not in DEVICES:
        error = unknown_name("device", name, DEVICES)
        raise type(error)(f"{where}{error}")
    return DEVICES[plain]
