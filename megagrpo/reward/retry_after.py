"""The Retry-After header of a busy server."""

from __future__ import annotations

import time
from email.utils import parsedate_to_datetime

RETRY_AFTER_SECONDS_MAX = 300.0


def retry_after(header: str | None) -> float | None:
    """Returns the seconds of a Retry-After header, a number or a date, at most 300. Returns None if it is neither.

    >>> retry_after("7"), retry_after("Thu, 01 Jan 1970 00:00:00 GMT"), retry_after("soon"), retry_after("1e9")
    (7.0, 0.0, None, 300.0)
    """
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            seconds = parsedate_to_datetime(header).timestamp() - time.time()
        except (ValueError, OverflowError):
            return None
    return min(max(seconds, 0.0), RETRY_AFTER_SECONDS_MAX) if seconds == seconds else None
