"""A .npy writer and reader for the tests, independent of the one under test.

SPDX-License-Identifier: Apache-2.0
"""

import ast
import math
import struct

FORMATS = {"<f2": "e", "<f4": "f", "<f8": "d"}


def write(path, descr, shape, values):
    header = repr({"descr": descr, "fortran_order": False, "shape": tuple(shape)}).encode() + b"\n"
    with open(path, "wb") as file:
        file.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header)
        file.write(struct.pack(f"<{len(values)}{FORMATS[descr]}", *values))


def read(path):
    """Returns (descr, shape, values)."""
    with open(path, "rb") as file:
        raw = file.read()
    assert raw[:8] == b"\x93NUMPY\x01\x00", raw[:8]
    (length,) = struct.unpack("<H", raw[8:10])
    header = ast.literal_eval(raw[10 : 10 + length].decode())
    assert header["fortran_order"] is False
    values = struct.unpack(
        f"<{math.prod(header['shape'])}{FORMATS[header['descr']]}", raw[10 + length :]
    )
    return header["descr"], list(header["shape"]), list(values)
