"""The part of Chakra's schema/protobuf/et_def.proto that traces of programs use, as protobuf's own descriptors."""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_FIELDS = {  # message -> (name, number, type, repeated)
    "AttributeProto": [
        ("name", 1, "string", False),
        ("int64_val", 9, "int64", False),
        ("bool_val", 27, "bool", False),
        ("string_val", 29, "string", False),
    ],
    "GlobalMetadata": [("version", 1, "string", False), ("attr", 2, "AttributeProto", True)],
    "Node": [
        ("id", 1, "uint64", False),
        ("name", 2, "string", False),
        ("type", 3, "int32", False),  # the enumeration NodeType, which travels as int32 does
        ("ctrl_deps", 4, "uint64", True),
        ("data_deps", 5, "uint64", True),
        ("start_time_micros", 6, "uint64", False),
        ("duration_micros", 7, "uint64", False),
        ("attr", 10, "AttributeProto", True),
    ],
}


def messages() -> dict[str, Any]:
    """The classes of these messages, by name."""
    file = descriptor_pb2.FileDescriptorProto(name="et_def.proto", package="ChakraProtoMsg", syntax="proto3")
    for name, fields in _FIELDS.items():
        made = file.message_type.add(name=name)
        for field, number, kind, repeated in fields:
            if field.endswith("_val") and not made.oneof_decl:
                made.oneof_decl.add(name="value")
            row = made.field.add(name=field, number=number, label=3 if repeated else 1)
            if field.endswith("_val"):
                row.oneof_index = 0
            if kind in _FIELDS:
                row.type, row.type_name = row.TYPE_MESSAGE, f".ChakraProtoMsg.{kind}"
            else:
                row.type = getattr(row, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = message_factory.GetMessageClassesForFiles(["et_def.proto"], pool)
    return {name.rpartition(".")[2]: made for name, made in found.items()}


def read(data: bytes) -> tuple[Any, list[Any]]:
    """A trace's metadata and nodes."""
    kinds, parts = messages(), list[bytes]()
    while data:
        start = next(position for position, byte in enumerate(data) if byte < 0x80) + 1  # behind a varint
        length = sum((byte & 0x7F) << 7 * position for position, byte in enumerate(data[:start]))
        parts.append(data[start : start + length])
        data = data[start + length :]
    return kinds["GlobalMetadata"].FromString(parts[0]), [
        kinds["Node"].FromString(part) for part in parts[1:]
    ]
