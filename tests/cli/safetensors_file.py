"""A safetensors writer and reader for the tests, independent of the one under test.

SPDX-License-Identifier: Apache-2.0
"""

import json
import struct

FORMATS = {"F64": "d", "F32": "f", "F16": "e", "I64": "q", "I32": "i", "U8": "B", "BOOL": "B"}


def pack(dtype, values):
    if dtype == "BF16":  # the upper half of an f32, rounded to nearest even
        bits = struct.unpack(f"<{len(values)}I", struct.pack(f"<{len(values)}f", *values))
        rounded = [(b + 0x7FFF + ((b >> 16) & 1)) >> 16 for b in bits]
        return struct.pack(f"<{len(values)}H", *rounded)
    return struct.pack(f"<{len(values)}{FORMATS[dtype]}", *values)


def unpack(dtype, data):
    if dtype == "BF16":
        halves = struct.unpack(f"<{len(data) // 2}H", data)
        words = struct.pack(f"<{len(halves)}I", *[h << 16 for h in halves])
        return list(struct.unpack(f"<{len(halves)}f", words))
    size = struct.calcsize("<" + FORMATS[dtype])
    return list(struct.unpack(f"<{len(data) // size}{FORMATS[dtype]}", data))


def write(path, tensors):
    """tensors: name -> (dtype, shape, values), or bytes in place of the values."""
    header, blobs, offset = {}, [], 0
    for name, (dtype, shape, values) in tensors.items():
        blob = values if isinstance(values, bytes) else pack(dtype, values)
        header[name] = {"dtype": dtype, "shape": list(shape),
                        "data_offsets": [offset, offset + len(blob)]}
        blobs.append(blob)
        offset += len(blob)
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for blob in blobs:
            file.write(blob)


def read(path):
    """Returns (name -> (dtype, shape, values), metadata)."""
    with open(path, "rb") as file:
        raw = file.read()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    tensors, end = {}, 0
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        begin, stop = entry["data_offsets"]
        assert begin == end, f"{name} leaves a hole at {end}"
        end = stop
        data = raw[8 + length + begin : 8 + length + stop]
        tensors[name] = (entry["dtype"], entry["shape"], unpack(entry["dtype"], data))
    assert 8 + length + end == len(raw), "bytes after the last tensor"
    return tensors, metadata
