"""POST requests to judges and to servers of scores: their answers are bounded, and no redirect is followed."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp

RETRY_AFTER_SECONDS_MAX = 300.0


async def post(
    session: aiohttp.ClientSession, url: str, timeout_seconds: float, bytes_max: int, **request: Any
) -> tuple[int, bytes | None, float | None]:
    """Returns status, body and seconds of Retry-After; None for a body of more than bytes_max.

    request: further arguments of aiohttp. Raises TimeoutError, or another OSError without an answer.
    """
    timeout = aiohttp.ClientTimeout(timeout_seconds)
    data = bytearray()
    try:
        # A redirection could take a key elsewhere.
        async with session.post(url, timeout=timeout, allow_redirects=False, **request) as answer:
            after = retry_after(answer.headers.get("Retry-After"))
            try:
                async for chunk in answer.content.iter_any():
                    data += chunk
                    if len(data) > bytes_max:
                        return answer.status, None, after
            except (aiohttp.ClientError, OSError):
                if answer.status == 200:
                    raise  # for any other status the caller decides by the status, whatever its body lacks
            return answer.status, bytes(data), after
    except aiohttp.ClientError as error:
        if isinstance(error, OSError):
            raise
        raise OSError(f"{type(error).__name__}: {error}") from error


def retry_after(header: str | None) -> float | None:
    """Returns the seconds of a Retry-After header, a number or a date, at most 300. Returns None if it is neither.

    >>> retry_after("7"), retry_after("Thu, 01 Jan 1970 00:00:00 GMT"), retry_after("soon"), retry_after("1e9")
    (7.0, 0.0, None, 300.0)
    """
    seconds = math.nan
    with suppress(ValueError, OverflowError):
        seconds = parsedate_to_datetime(header or "").timestamp() - time.time()
    with suppress(ValueError):
        seconds = float(header or "")
    return None if math.isnan(seconds) else min(max(seconds, 0.0), RETRY_AFTER_SECONDS_MAX)
