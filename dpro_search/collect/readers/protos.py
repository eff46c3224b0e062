"""The few protobuf messages that the readers need, built at run time: no generated files, no framework.

Only the listed fields are decoded; the others (constants' values, most attributes) are skipped as opaque bytes. Field numbers:
`tsl/profiler/protobuf/xplane.proto`, `tensorflow/core/framework/{graph,node_def,attr_value,step_stats}.proto`,
`tensorflow/core/protobuf/config.proto` and `et_def.proto` of MLCommons Chakra. A map field is, on the wire, a repeated message of
`key` and `value`: so declared here.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from dpro_search.collect.readers._salvage import damaged
from dpro_search.collect.readers._wire import lenient
from dpro_search.errors import TraceFormatError

# message -> fields as "name number type"; "*" marks a repeated field, a capitalised type is another message of the table.
_SCHEMA: dict[str, tuple[str, ...]] = {
    "XSpace": ("planes 1 XPlane*",),
    "XPlane": (
        "name 2 string",
        "lines 3 XLine*",
        "event_metadata 4 XEventMetadataEntry*",
        "stat_metadata 5 XStatMetadataEntry*",
        "stats 6 XStat*",
    ),
    "XLine": ("id 1 int64", "name 2 string", "timestamp_ns 3 int64", "events 4 XEvent*"),
    "XEvent": ("metadata_id 1 int64", "offset_ps 2 int64", "duration_ps 3 int64", "stats 4 XStat*"),
    "XStat": (
        "metadata_id 1 int64",
        "uint64_value 3 uint64",
        "int64_value 4 int64",
        "str_value 5 string",
        "ref_value 7 uint64",
    ),
    "XEventMetadataEntry": ("key 1 int64", "value 2 XMetadata"),
    "XStatMetadataEntry": ("key 1 int64", "value 2 XMetadata"),
    "XMetadata": ("name 2 string",),
    "RunMetadata": ("step_stats 1 StepStats", "partition_graphs 3 GraphDef*", "function_graphs 4 FunctionGraphs*"),
    "StepStats": ("dev_stats 1 DeviceStepStats*",),
    "DeviceStepStats": ("device 1 string", "node_stats 2 NodeExecStats*"),
    "NodeExecStats": (
        "node_name 1 string",
        "all_start_micros 2 int64",
        "all_end_rel_micros 5 int64",
        "output 7 NodeOutput*",
        "timeline_label 8 string",
        "thread_id 10 uint32",
        "all_start_nanos 13 int64",
        "all_end_rel_nanos 16 int64",
    ),
    "NodeOutput": ("slot 1 int32", "tensor_description 3 TensorDescription"),
    "TensorDescription": ("dtype 1 int32", "shape 2 TensorShape"),
    "TensorShape": ("dim 2 Dimension*",),
    "Dimension": ("size 1 int64",),
    "FunctionGraphs": ("partition_graphs 1 GraphDef*",),
    "GraphDef": ("node 1 NodeDef*",),
    "NodeDef": ("name 1 string", "op 2 string", "input 3 string*", "attr 5 AttrEntry*"),
    "AttrEntry": ("key 1 string", "value 2 AttrValue"),
    "AttrValue": ("i 3 int64", "b 5 bool", "type 6 int32"),
    "ChakraMetadata": ("version 1 string", "attr 2 ChakraAttr*"),
    "ChakraNode": (
        "id 1 uint64",
        "name 2 string",
        "type 3 int32",
        "ctrl_deps 4 uint64*",
        "data_deps 5 uint64*",
        "start_time_micros 6 uint64",
        "duration_micros 7 uint64",
        "inputs 8 ChakraValues",
        "outputs 9 ChakraValues",
        "attr 10 ChakraAttr*",
    ),
    "ChakraValues": ("values 1 string", "shapes 2 string", "types 3 string"),
    "ChakraAttr": (
        "name 1 string",
        "double_val 3 double",
        "int32_val 7 int32",
        "int64_val 9 int64",
        "uint32_val 11 uint32",
        "uint64_val 13 uint64",
        "bool_val 27 bool",
        "string_val 29 string",
    ),
}

_MOST_LOST = 0.1  # of a file's bytes: with more, a whole container of records is damaged, and the file is refused
_PACKAGE = "dpro_search.protos"


def _build() -> dict[str, Any]:
    field_type = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="dpro_search/protos.proto", package=_PACKAGE, syntax="proto2")
    for message, rows in _SCHEMA.items():
        descriptor = file.message_type.add(name=message)
        for row in rows:
            name, number, kind = row.split()
            field = descriptor.field.add(name=name, number=int(number))
            field.label = field_type.LABEL_REPEATED if kind.endswith("*") else field_type.LABEL_OPTIONAL
            kind = kind.rstrip("*")
            if kind in _SCHEMA:
                field.type, field.type_name = field_type.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
            else:
                field.type = getattr(field_type, f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _SCHEMA}


MESSAGES = _build()


def parse(message: str, data: bytes, where: Path, dropped: Counter[str] | None = None) -> Any:
    """Decode one message of a file.

    Parameters
    ----------
    where
        The file, for errors.
    dropped
        Counts the parts that cannot be decoded; None: there may be none.

    Raises
    ------
    TraceFormatError
        The bytes are no such message, are cut off, or more than a part of them is damaged.
    """
    try:
        return MESSAGES[message].FromString(data)
    except DecodeError as error:
        refusal = TraceFormatError(f"{where}: not a whole {message} protobuf; record or copy the file again")
        if dropped is None:
            raise refusal from error
    decoded, lost, lost_bytes = lenient(MESSAGES[message], data)
    if lost_bytes > len(data) * _MOST_LOST:
        raise refusal
    dropped[damaged(where)] += lost
    return decoded


def text(value: str | bytes) -> str:
    """A string field as a string: one that is not UTF-8 comes as bytes."""
    return value if isinstance(value, str) else value.decode("utf-8", "replace")
