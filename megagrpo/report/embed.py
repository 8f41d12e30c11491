"""Parts of a report's page, and their columns: compressed into the page, or sent to a page that is open."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np

Columns = Mapping[str, Any]
"""Values of JSON, and numpy arrays as values of this mapping or of mappings in it. NaN may be in arrays only."""

ARRAY = "$array"
ALIGNMENT = 8  # bytes; a typed array begins at a multiple of its item's size
TYPES = {"f4": "Float32Array", "f8": "Float64Array", "i4": "Int32Array", "i2": "Int16Array", "i1": "Int8Array",
         "u4": "Uint32Array", "u2": "Uint16Array", "u1": "Uint8Array"}  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A section of the page.

    anchor: its id. html: its content, before its script if it has one. data: columns by name; a name is unique in the
    page, and report.load(name) gives them to scripts of any part. late: the same, encoded already, for columns that a
    page reads on demand. scripts: files of this folder, which call report.part(anchor, start). styles: the
    same in CSS.
    """

    anchor: str
    title: str
    html: str = ""
    data: Mapping[str, Columns] = field(default_factory=dict)
    late: Mapping[str, bytes] = field(default_factory=dict)
    scripts: tuple[str, ...] = ()
    styles: tuple[str, ...] = ()


def encode(columns: Columns) -> bytes:
    """Encodes columns for a page's script: gzip of the length of the JSON (uint32), the JSON, then the arrays' bytes.

    In the JSON an array is {"$array": [its JavaScript type, first byte behind the JSON, items]}. int64 and bool arrays,
    which JavaScript lacks, become float64 and uint8. Raises ValueError if a number outside of arrays is not finite.
    """
    arrays, size = list[bytes](), 0

    def place(value: object) -> object:
        nonlocal size
        if isinstance(value, np.generic):
            return value.item()
        if not isinstance(value, np.ndarray):
            raise TypeError(f"{type(value).__name__} is neither JSON nor an array")
        kind = {"i8": "f8", "u8": "f8", "b1": "u1", "f2": "f4"}.get(value.dtype.str[1:], value.dtype.str[1:])
        raw = np.ascontiguousarray(value, dtype=f"<{kind}").tobytes()
        mark = {ARRAY: [TYPES[kind], size, value.size]}
        arrays.append(raw + bytes(-len(raw) % ALIGNMENT))
        size += len(arrays[-1])
        return mark

    text = json.dumps(columns, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=place)
    header = text.encode(errors="replace")
    header += b" " * (-(4 + len(header)) % ALIGNMENT)
    return gzip.compress(b"".join((struct.pack("<I", len(header)), header, *arrays)), compresslevel=6, mtime=0)


def digest(encoded: bytes) -> str:
    """Returns a digest by which an open page sees that its columns have changed."""
    return hashlib.sha256(encoded).hexdigest()[:16]


def embed(name: str, encoded: bytes) -> str:
    """Returns the element that carries encoded columns in a page; `await report.load(name)` gives them to a script."""
    text = base64.b64encode(encoded).decode()
    kind = 'type="application/octet-stream"'
    return f'<script {kind} data-name="{escape(name)}" data-digest="{digest(encoded)}">{text}</script>\n'
