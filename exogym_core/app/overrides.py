"""`--set a.b=c`: single keys of a document replaced, as strictly read as the file itself.

`--scale tiny` replaces the keys that the document lists under `scales: {tiny: ...}`, in the same way.
"""

from __future__ import annotations

import copy
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from netsim.files.documents import Document, parse_document
from netsim.files.errors import InputError, UnknownNameError, unknown_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from netsim.files.problems import KeyPath, Mistake

__all__ = ["apply_overrides", "apply_values"]

# The key whose value a plain name in a mapping's place is, where it is not `name`.
_PLAIN: dict[str | int, str] = {"protocol": "preset"}


@dataclass(frozen=True)
class _Overridden(Document):
    """A document some of whose keys come from flags; errors there name the flag instead of a line."""

    flags: Mapping[KeyPath, str] = field(default_factory=dict)

    def errors(self, problems: Iterable[Mistake]) -> InputError:
        told: list[InputError] = []
        in_file: list[Mistake] = []
        for problem in problems:
            flag = self._flag_of((*self.inside, *problem.path))
            if flag is None:
                in_file.append(problem)
            else:
                told.append(Document(flag, self.data, inside=self.inside).errors([problem]))
        if in_file:
            told.append(super().errors(in_file))
        kind = UnknownNameError if isinstance(told[0], UnknownNameError) else InputError
        return kind("\n".join(str(error) for error in told))

    def _flag_of(self, path: KeyPath) -> str | None:
        for length in range(len(path), 0, -1):
            if path[:length] in self.flags:
                return self.flags[path[:length]]
        return None


def apply_overrides(
    document: Document,
    overrides: Sequence[str],
    options: Mapping[str, object] | None = None,
    scale: str | None = None,
) -> Document:
    """`document` with keys replaced by `key.path=value` texts, and top-level keys by `options` of that name.

    What the document's `scales` list for `scale` is replaced first.

    A path goes through mappings by key and through lists by position or by an entry's name
    (`strategies.DiLoCo.H=20`); `*` is every key or entry there is (`strategies.*.lr=0.01`). What is missing on
    the way is made; a plain name on the way becomes `{name: ...}`.

    Raises:
        InputError: an override cannot be read or placed; the line begins with the flag.
    """
    data = copy.deepcopy(document.data)
    if not isinstance(data, dict):
        return document  # the schema says what is wrong with it
    lines = dict(document.lines)
    if scale is not None:
        _apply_scale(document, data, lines, scale)
    flags: dict[KeyPath, str] = {}
    # A flag of its own replaces a whole key, and --set what is inside: `--protocol gloo --set protocol.streams=8`.
    for name, given in (options or {}).items():
        data[name] = given
        told = ",".join(map(str, given)) if isinstance(given, list) else given
        flags[(name,)] = f"--{name} {told}"
    for text in overrides:
        flag = f"--set {text}"
        key, separator, value = text.partition("=")
        if not separator or not key.strip():
            raise InputError(f"{flag}: expected KEY=VALUE, such as --set steps=20")
        read = _read(value, flag)
        if key.strip() in (options or {}):
            continue
        for path in _place(data, key.strip().split("."), read, flag):
            flags[path] = flag
    return _Overridden(document.where, data, lines, flags=flags)


def apply_values(document: Document, values: Mapping[str, object], told: str) -> Document:
    """`document` with keys replaced by `values`, each under a key path as `--set` has it.

    Args:
        document: what they are put into; it is left as it is.
        values: plain data by key path.
        told: what errors about these keys begin with, such as `point lr=0.1`.

    Raises:
        InputError: there is no place for a key.
    """
    data = copy.deepcopy(document.data)
    if not isinstance(data, dict):
        return document  # the schema says what is wrong with it
    flags = {
        path: told
        for key, value in values.items()
        for path in _place(data, key.split("."), copy.deepcopy(value), told)
    }
    return _Overridden(document.where, data, document.lines, flags=flags)


def _apply_scale(document: Document, data: dict[str, Any], lines: dict[KeyPath, int], scale: str) -> None:
    """Replace in `data` what `scales` lists for `scale`; `lines` then tell where that was written."""
    scales = data.get("scales")
    if not isinstance(scales, dict) or not scales:
        raise InputError(f"--scale {scale}: {document.where} has no 'scales'; leave --scale out")
    if scale not in scales:
        raise document.error(("scales",), unknown_name("scale", scale, scales))
    if not isinstance(scales[scale], dict):
        return  # the schema says what is wrong with it
    for key, value in scales[scale].items():
        origin = ("scales", scale, key)
        line = document.line_of(origin)
        flag = f"{document.where}:{line}: scales.{scale}.{key}"
        written = {known[3:]: at for known, at in document.lines.items() if known[:3] == origin}
        for path in _place(data, key.split("."), copy.deepcopy(value), flag):
            for known in [known for known in lines if known[: len(path)] == path]:
                del lines[known]
            lines.update({(*path, *rest): at for rest, at in written.items()})


def _read(value: str, flag: str) -> object:
    try:
        return parse_document(value, flag).data
    except InputError as error:
        # A flag has no lines.
        raise type(error)(re.sub(rf"^{re.escape(flag)}:\d+: ", lambda _: f"{flag}: ", str(error))) from None


def _place(data: dict[str, Any], keys: Sequence[str], value: object, flag: str) -> list[KeyPath]:
    """Put `value` where `keys` lead, and return its key paths: several where a `*` is on the way."""
    reached: list[tuple[KeyPath, Any]] = [((), data)]
    for position, key in enumerate(keys):
        is_last = position == len(keys) - 1
        further: list[tuple[KeyPath, Any]] = []
        for path, container in reached:
            for step in _steps(container, key, flag):
                if is_last:
                    container[step] = copy.deepcopy(value) if len(reached) > 1 or key == "*" else value
                    further.append(((*path, step), None))
                else:
                    further.append(((*path, step), _inside(container, step, keys[: position + 1], flag)))
        reached = further
    return [path for path, _ in reached]


def _inside(container: Any, step: str | int, keys: Sequence[str], flag: str) -> dict[str, Any] | list[Any]:
    """What stands there, made a mapping where it is missing or a plain name."""
    inside = container.get(step) if isinstance(container, dict) else container[step]
    if isinstance(inside, str):
        inside = {_PLAIN.get(step, "name"): inside}
    elif inside is None:
        inside = {}
    if not isinstance(inside, dict | list):
        raise InputError(f"{flag}: '{'.'.join(keys)}' has no keys inside")
    container[step] = inside
    return inside


def _steps(container: dict[str, Any] | list[Any], key: str, flag: str) -> list[str | int]:
    if key != "*":
        return [_step(container, key, flag)]
    if not container:
        raise InputError(f"{flag}: there is nothing that * could stand for")
    return list(container) if isinstance(container, dict) else list(range(len(container)))


def _step(container: dict[str, Any] | list[Any], key: str, flag: str) -> str | int:
    if isinstance(container, dict):
        if not key:
            raise InputError(f"{flag}: an empty key between dots")
        return key
    names = [
        (entry.get("label") or entry.get("name")) if isinstance(entry, dict) else entry for entry in container
    ]
    if key in names:
        return names.index(key)
    if key.isascii() and key.isdigit() and int(key) < len(container):
        return int(key)
    positions = [f"0 to {len(container) - 1}"] if container else []
    error = unknown_name("entry", key, [str(name) for name in names if name] + positions)
    raise type(error)(f"{flag}: {error}")
