"""Seconds of operations on a device by a roofline: FLOPs at a share of its peak, bytes at one of its bandwidth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from exogym_core.cost.operations import FACTORIZATIONS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from exogym_core.cost.devices import Device
    from exogym_core.cost.operations import TorchOperation

__all__ = ["MEMORY_SHARE", "PRODUCT_SHARE", "Roofline", "dtype_of"]

PRODUCT_SHARE = 0.7
"""Share of the peak that products of matrices reach where the table has no measurement of the device's."""

MEMORY_SHARE = 0.8
"""Share of the memory's bandwidth that operations reach which only move bytes."""

_aten = torch.ops.aten

_NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "fp64",
    torch.complex128: "fp64",
    torch.float32: "fp32",
    torch.complex64: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    **dict.fromkeys(
        (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz), "fp8"
    ),
}

#: Torch's settings of the precision of fp32 products, by operation; all others go by that of matrix products.
_SETTINGS: Mapping[str, Any] = {
    **dict.fromkeys(
        (
            "aten.convolution",
            "aten._convolution",
            "aten.cudnn_convolution",
            "aten._slow_conv2d_forward",
            "aten.convolution_overrideable",
            "aten.convolution_backward",
        ),
        torch.backends.cudnn.conv,  # type: ignore[attr-defined]
    ),
    **dict.fromkeys(
        (
            "aten._cudnn_rnn",
            "aten._cudnn_rnn_backward",
            "aten.mkldnn_rnn_layer",
            "aten.mkldnn_rnn_layer_backward",
        ),
        torch.backends.cudnn.rnn,
    ),
    **dict.fromkeys(map(str, FACTORIZATIONS)),  # of no setting: never tf32
}


def dtype_of(operation: TorchOperation) -> str:
    """The dtype in which a product is computed: that of its first operand, tf32 where torch's settings allow it."""
    dtype = next((each.dtype for each in operation.operands), torch.float32)
    name = _NAMES.get(dtype, str(dtype).removeprefix("torch."))
    if name == "fp32":
        setting = _SETTINGS.get(operation.name, torch.backends.cuda.matmul)
        return "tf32" if setting is not None and setting.fp32_precision == "tf32" else name
    return name


class Roofline:
    """Seconds of operations on a device, and what bounds each.

    An operation takes the longest of three: its FLOPs at `product_share` of the peak in its dtype, its bytes at
    `memory_share` of the bandwidth, and the launch of a kernel (Williams et al., Roofline, CACM 2009; the launch is
    the third bound).

    Attributes:
        device: of the table.
        name: its name.
        product_share: of the peak, for products.
        memory_share: of the bandwidth.
        rates: FLOPs a second by the dtype of a product, as text such as `fp64 as fp32`, of those met so far.
    """

    def __init__(
        self,
        device: Device,
        name: str,
        product_share: float | None = None,
        memory_share: float = MEMORY_SHARE,
    ) -> None:
        self.device, self.name, self.memory_share = device, name, memory_share
        self.product_share = product_share or device.best_product or PRODUCT_SHARE
        self.rates: dict[str, float] = {}
        self._rate_of: dict[str, float] = {}
        self._bytes_per_second = device.memory_bytes_per_second * memory_share

    def seconds(self, operation: TorchOperation) -> tuple[float, str]:
        """Seconds of an operation, and what bounds them: `products`, `memory` or `launches`."""
        moving = operation.num_bytes / self._bytes_per_second
        longest = (
            (moving, "memory")
            if moving > self.device.launch_seconds
            else (self.device.launch_seconds, "launches")
        )
        if not operation.flops:
            return longest
        dtype = dtype_of(operation)
        rate = self._rate_of.get(dtype) or self._meet(dtype)
        return max((operation.flops * (1.0 - operation.skipped) / rate, "products"), longest)

    def _meet(self, dtype: str) -> float:
        known = dtype in _NAMES.values() or dtype == "tf32"
        unit = self.device.unit_for(dtype if known else "fp32", self.name)
        rate = self._rate_of[dtype] = self.device.flops[unit] * self.product_share
        self.rates[dtype if unit == dtype else f"{dtype} as {unit}"] = rate
        return rate
