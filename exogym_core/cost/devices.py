"""Peak speeds of common devices, from their makers' data sheets (`topologies/devices.csv`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, get_args

from netsim.errors import unknown_name
from netsim.topology.devices import device_name, device_table

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["DEVICES", "DTYPES", "Device", "Dtype", "find_device"]

Dtype: TypeAlias = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)

#: Dtypes that stand in for one a device lacks, the first that it has.
_STAND_INS: Mapping[str, tuple[str, ...]] = {"fp8": ("bf16", "fp16", "fp32")}


@dataclass(frozen=True)
class Device:
    """A device by its peak dense speed.

    Attributes:
        flops: operations a second by dtype, multiply and add counted as two; no structured sparsity, matrix
            units where the dtype has them, and for lower precisions the rate with fp32 accumulation.
        source: where the figures are published; those named behind `unsourced:` were not looked up. Processors' are
            cores x base clock x operations a cycle (two fused multiply-adds of 128 bits for NEON, 256 for AVX2, 512
            for AVX-512).
        memory_bytes: of its own, in the model that has most; None where it is the machine's.
        memory_bytes_per_second: peak bandwidth of that memory.
        launch_seconds: an operation that a program launches takes at least this long.
        best_product: share of the peak that the fastest product of matrices in bf16 was measured at; None: not known.
    """

    flops: Mapping[str, float]
    source: str
    memory_bytes: float | None
    memory_bytes_per_second: float
    launch_seconds: float
    best_product: float | None = None

    def unit_for(self, dtype: str, name: str) -> str:
        """The dtype of `flops` in which the device computes `dtype`: another one where it has no unit for it.

        Raises:
            UnknownNameError: no device here computes in `dtype`.
        """
        if dtype in self.flops:
            return dtype
        if dtype not in DTYPES:
            raise unknown_name(f"dtype of device {name}", dtype, self.flops)
        return next(each for each in _STAND_INS.get(dtype, ("fp32",)) if each in self.flops)

    def flops_for(self, dtype: str, name: str) -> float:
        """Peak operations a second in `dtype`; one that the device lacks runs as `unit_for` says.

        Raises:
            UnknownNameError: no device here computes in `dtype`.
        """
        return self.flops[self.unit_for(dtype, name)]


DEVICES: dict[str, Device] = {
    name: Device(
        {dtype: float(row[dtype]) * 1e12 for dtype in DTYPES if row[dtype]},
        row["source"],
        float(row["memory_gb"]) * 1e9 if row["memory_gb"] else None,
        float(row["memory_gb_s"]) * 1e9,
        float(row["launch_us"]) * 1e-6,
        float(row["best_product"]) if row["best_product"] else None,
    )
    for name, row in device_table().items()
}
"""Known devices by name."""


def find_device(name: str, where: str = "") -> Device:
    """The device of this name, however it is spelt ("RTX 4090" is "rtx-4090").

    Args:
        name: as a user wrote it.
        where: prefix of the error's line, such as "host us.0: ".

    Raises:
        UnknownNameError: no such device; the line lists them, the likeliest first.
    """
    return DEVICES[device_name(name, where)]
