"""The format of TensorBoard's event files: records with checksums, each an event in protobuf.

TensorBoard itself takes 50 MB; of its messages this declares the fields of scalars, and protobuf skips the others.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

VERSION = "brain.Event:2"
"""``file_version`` of the first event of a file."""
_MASK = 0xA282EAD8


@cache
def event_class() -> Any:
    """Returns the message ``Event``: ``wall_time``, ``step``, ``file_version`` and ``summary.value``.

    Each of ``summary.value`` has a ``tag`` and a ``simple_value`` of 32 bits.
    """
    from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
    from google.protobuf.descriptor_pool import DescriptorPool
    from google.protobuf.message_factory import GetMessageClass

    kinds = FieldDescriptorProto
    file = FileDescriptorProto(name="event.proto", package="tensorflow", syntax="proto3")
    file.message_type.add(name="Value").field.extend(
        [
            kinds(name="tag", number=1, type=kinds.TYPE_STRING, label=kinds.LABEL_OPTIONAL),
            kinds(name="simple_value", number=2, type=kinds.TYPE_FLOAT, label=kinds.LABEL_OPTIONAL, oneof_index=0),
        ]
    )
    file.message_type[0].oneof_decl.add(name="value")  # so that 0 differs from no scalar
    file.message_type.add(name="Summary").field.add(
        name="value", number=1, type=kinds.TYPE_MESSAGE, type_name=".tensorflow.Value", label=kinds.LABEL_REPEATED
    )
    file.message_type.add(name="Event").field.extend(
        [
            kinds(name="wall_time", number=1, type=kinds.TYPE_DOUBLE, label=kinds.LABEL_OPTIONAL),
            kinds(name="step", number=2, type=kinds.TYPE_INT64, label=kinds.LABEL_OPTIONAL),
            kinds(name="file_version", number=3, type=kinds.TYPE_STRING, label=kinds.LABEL_OPTIONAL),
            kinds(
                name="summary",
                number=5,
                type=kinds.TYPE_MESSAGE,
                type_name=".tensorflow.Summary",
                label=kinds.LABEL_OPTIONAL,
            ),
        ]
    )
    pool = DescriptorPool()  # of its own, as TensorBoard's may be loaded, too
    pool.Add(file)
    return GetMessageClass(pool.FindMessageTypeByName("tensorflow.Event"))


def records(file: Path) -> Iterator[bytes]:
    """Yields the records of a file up to the first that is damaged or cut off, as it may be written at this moment.

    Raises:
        OSError: it cannot be read.
    """
    with file.open("rb") as stream:
        while len(head := stream.read(12)) == 12:
            length, check = struct.unpack("<QI", head)
            if _checksum(head[:8]) != check:
                return
            body = stream.read(length + 4)
            if len(body) < length + 4 or _checksum(body[:-4]) != struct.unpack("<I", body[-4:])[0]:
                return
            yield body[:-4]


def record(data: bytes) -> bytes:
    """Returns bytes as a record: their length in 8 bytes, its checksum, the bytes, their checksum."""
    length = struct.pack("<Q", len(data))
    return b"".join((length, struct.pack("<I", _checksum(length)), data, struct.pack("<I", _checksum(data))))


def _checksum(data: bytes) -> int:
    from google_crc32c import value

    crc: int = value(data)
    return (((crc >> 15) | (crc << 17)) + _MASK) & 0xFFFFFFFF
