"""JSON that keeps what parquet files hold besides JSON's own types: bytes, decimals, dates, times, tuples, other keys.

A value of such a type is written as {"\\0type": [TYPE, TEXT]}.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from zoneinfo import ZoneInfo

from megagrpo.errors import brief, first_line

TYPE = "\0type"


def _datetime_text(value: datetime) -> str:
    zone = value.tzinfo.key if isinstance(value.tzinfo, ZoneInfo) else ""
    return f"{value.replace(tzinfo=None) if zone else value} {value.fold} {zone}"


def _datetime(text: str) -> datetime:
    value, fold, zone = text.rsplit(" ", 2)
    moment = datetime.fromisoformat(value).replace(fold=int(fold))
    return moment.replace(tzinfo=ZoneInfo(zone)) if zone else moment


TYPES: Mapping[type, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    bytes: (bytes.hex, bytes.fromhex),
    Decimal: (str, Decimal),
    date: (date.isoformat, date.fromisoformat),
    time: (time.isoformat, time.fromisoformat),
    datetime: (_datetime_text, _datetime),
    timedelta: (
        lambda value: f"{value.days} {value.seconds} {value.microseconds}",
        lambda text: timedelta(*map(int, text.split())),
    ),
}
BY_NAME = {kind.__name__: read for kind, (_, read) in TYPES.items()}


def dumps(value: Any) -> str:
    """Writes the value as JSON, and values of no known type, such as a time of nanoseconds, as their text. Raises
    ValueError if it is too deep."""
    try:
        return json.dumps(packed(value, lambda other, _: str(other)))
    except RecursionError as error:
        raise ValueError("values too deep in each other") from error


def loads(text: str) -> Any:
    """Reads a value that `dumps` wrote."""
    value = json.loads(text)
    return unpacked(value) if "\\u0000type" in text else value


def packed(value: Any, other: Callable[[Any, str], Any], where: str = "") -> Any:
    """Converts the value to JSON's own types. `other` converts values of no known type, given value and place."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [packed(item, other, f"{where}[{index}]") for index, item in enumerate(value)]
    if type(value) is tuple:
        return {TYPE: ["tuple", packed(list(value), other, where)]}
    if type(value) is dict and TYPE not in value and all(type(key) is str for key in value):
        return {key: packed(item, other, f"{where}.{key}") for key, item in value.items()}
    if type(value) is dict:
        return {TYPE: ["dict", packed([list(pair) for pair in value.items()], other, where)]}
    if type(value) in TYPES:
        return {TYPE: [type(value).__name__, TYPES[type(value)][0](value)]}
    return other(value, where)


def unpacked(value: Any) -> Any:
    """Restores a value that `packed` converted. Raises ValueError for anything that `packed` does not write."""
    if isinstance(value, list):
        return [unpacked(item) for item in value]
    if not isinstance(value, dict):
        return value
    if TYPE not in value:
        return {key: unpacked(item) for key, item in value.items()}
    try:
        match value[TYPE]:
            case ["tuple", list(items)]:
                return tuple(unpacked(items))
            case ["dict", list(items)]:
                return dict(map(tuple, unpacked(items)))
            case [str(name), str(text)] if name in BY_NAME:
                return BY_NAME[name](text)
    except (ArithmeticError, TypeError, KeyError) as error:  # such as a zone that this machine does not know
        raise ValueError(f"{brief(value)}: {first_line(error)}") from error
    raise ValueError(f"a value {brief(value)}")
