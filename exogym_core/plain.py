"""Nested plain values as bytes that carry no code: JSON, and tensors as safetensors; nothing pickled.

    data = packed({"loss": 0.5, "weights": torch.ones(3)})
    unpacked(data)                          # refuses what `packed` did not make; never runs anything

Values that JSON lacks (tuples, keys that are no text, tensors, bytes) are objects with the key `$`. `reachable` walks
nested values of any kind.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from netsim.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["decode", "encode", "packed", "reachable", "unpacked"]

_LENGTH = struct.Struct("<Q")
_MARK = b"netgym plain 1\n"
_FOREIGN = (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error, SafetensorError)


def packed(value: Any, where: str = "object") -> bytes:
    """Encode a value as bytes, equal bytes for equal values.

    Raises:
        InputError: it holds something else; `where` begins the line.
    """
    tensors: dict[str, Tensor] = {}
    form = json.dumps(encode(value, tensors, where), separators=(",", ":")).encode()
    return b"".join([_MARK, _LENGTH.pack(len(form)), form, save(tensors)])


def unpacked(data: bytes) -> Any:
    """Decode the bytes of `packed`.

    Raises:
        InputError: the bytes are not those of `packed`.

    >>> unpacked(packed({1: (2, "x")}))
    {1: (2, 'x')}
    """
    try:
        if not data.startswith(_MARK):
            raise ValueError("unknown header")
        start = len(_MARK) + _LENGTH.size
        (length,) = _LENGTH.unpack(data[len(_MARK) : start])
        return decode(json.loads(data[start : start + length]), load(data[start + length :]))
    except _FOREIGN as error:
        raise InputError(
            f"an object received from another rank is not in NetGym's format ({error}); "
            "run the same version on all ranks"
        ) from None


_LONGEST_RANGE = 10**7  # which another program wrote, and this one may walk


def encode(value: Any, tensors: dict[str, Tensor], where: str = "state") -> Any:
    """Encode a value as JSON can hold it; its tensors are added to `tensors`, copied to the CPU.

    Takes None, truth values, numbers (exactly, nan and infinities too), text, bytes, lists, tuples, ranges, sets,
    mappings with any such keys, Counters, dtypes, devices, numpy's arrays and torch's tensors, nested in each other.

    Raises:
        InputError: something else; the line says where it is.

    >>> encode({"a": (1, None), 2: b"x"}, {})["items"][1]
    [2, {'$': 'bytes', 'base64': 'eA=='}]
    """
    match value:
        case None | bool() | str():
            return value
        case int():
            return int(value)
        case float():
            return float(value)
        case Tensor():
            name = str(len(tensors))
            # Without values, as in plans, it is kept for its shape.
            tensors[name] = value if value.is_meta else value.detach().to("cpu", copy=True).contiguous()
            place = {} if value.is_cpu or value.is_meta else {"on_device": True}
            return {"$": "tensor", "name": name, **place}
        case np.ndarray():
            return {**encode(torch.from_numpy(value.copy()), tensors), "$": "array"}
        case np.generic():
            return value.item()
        case list():
            return [encode(item, tensors, f"{where}[{index}]") for index, item in enumerate(value)]
        case range():
            return {"$": "range", "bounds": [value.start, value.stop, value.step]}
        case tuple():
            return {"$": "tuple", "items": encode(list(value), tensors, where)}
        case set() | frozenset():
            items = encode(list(value), tensors, where)
            return {"$": type(value).__name__, "items": sorted(items, key=json.dumps)}
        case bytes():
            return {"$": "bytes", "base64": base64.b64encode(value).decode()}
        case torch.dtype() | torch.device():
            return {"$": type(value).__name__, "name": str(value).removeprefix("torch.")}
        case Mapping():
            if type(value) is not Counter and all(type(key) is str and key != "$" for key in value):
                return {key: encode(item, tensors, f"{where}.{key}") for key, item in value.items()}
            pairs = [
                [encode(key, tensors, where), encode(item, tensors, f"{where}[{key!r}]")]
                for key, item in value.items()
            ]
            return {"$": "counter" if isinstance(value, Counter) else "mapping", "items": pairs}
    raise InputError(
        f"{where} is a {type(value).__name__}; it must hold tensors, numbers, text, bytes, lists, tuples, sets "
        "and mappings alone, which carry no code"
    )


def decode(plain: Any, tensors: Mapping[str, Tensor], device: torch.device | None = None) -> Any:
    """Decode the value of `encode`; tensors that were on an accelerator come on `device`, if given.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: `plain` did not come from there.
    """
    if isinstance(plain, list):
        return [decode(item, tensors, device) for item in plain]
    if not isinstance(plain, dict):
        return plain
    match plain.get("$"):
        case None:
            return {key: decode(item, tensors, device) for key, item in plain.items()}
        case "tensor":
            tensor = tensors[plain["name"]]
            return tensor.to(device) if "on_device" in plain else tensor
        case "array":
            return tensors[plain["name"]].numpy()
        case "range":
            ranks = range(*plain["bounds"])
            if len(ranks) > _LONGEST_RANGE:
                raise ValueError(f"a range of {len(ranks):,} numbers")
            return ranks
        case "tuple":
            return tuple(decode(plain["items"], tensors, device))
        case "set" | "frozenset" as kind:
            return (set if kind == "set" else frozenset)(decode(plain["items"], tensors, device))
        case "bytes":
            return base64.b64decode(plain["base64"])
        case "dtype":
            dtype = getattr(torch, plain["name"])
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"no dtype: {plain['name']!r}")
            return dtype
        case "device":
            return torch.device(plain["name"])
        case "mapping" | "counter" as kind:
            items = {
                decode(key, tensors, device): decode(item, tensors, device) for key, item in plain["items"]
            }
            return Counter(items) if kind == "counter" else items
    raise ValueError(f"unknown kind {plain['$']!r}")


def reachable(
    root: object, opens: Callable[[object], bool], longest: float = math.inf, most: float = math.inf
) -> Iterator[object]:
    """`root` and the objects within its reach, each once: through mappings, lists, tuples, sets, and attributes.

    Args:
        root: begin here.
        opens: whether the attributes of an object lead further.
        longest: items of the longest mapping, list, tuple or set that leads further.
        most: objects after which the search ends.
    """
    seen: set[int] = set()
    waiting = [root]
    while waiting and len(seen) < most:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if isinstance(value, Mapping | list | tuple | set):
            items = value.values() if isinstance(value, Mapping) else value
            waiting += items if len(value) <= longest else ()
        elif opens(value):
            waiting += getattr(value, "__dict__", {}).values()
