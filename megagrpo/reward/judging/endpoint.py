"""An HTTP endpoint that receives judges' requests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import aiohttp

from megagrpo.reward.http_post import post
from megagrpo.reward.judging.client import Reply

ANSWER_BYTES_MAX = 4 << 20
SHOWN_MAX = 300


class HttpEndpoint:
    """A judge's server at a URL. concurrency: most connections to it, 0 for any number. proxies: use those that the
    environment names."""

    def __init__(self, url: str, api_key: str | None, concurrency: int, *, proxies: bool = True) -> None:
        self.identity, self._api_key = url, api_key
        self._url = f"{url.rstrip('/')}/chat/completions"
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        connector = aiohttp.TCPConnector(limit=concurrency)
        self._session = aiohttp.ClientSession(headers=headers, connector=connector, trust_env=proxies)

    async def post(self, body: Mapping[str, Any], timeout_seconds: float) -> Reply:
        try:
            status, data, after = await post(self._session, self._url, timeout_seconds, ANSWER_BYTES_MAX, json=body)
        except aiohttp.ClientError as error:
            if isinstance(error, OSError):
                raise
            raise OSError(f"{type(error).__name__}: {error}") from error
        if data is None:
            return Reply(status, text=f"more than {ANSWER_BYTES_MAX:,} bytes")
        try:
            answer = json.loads(data) if status == 200 else None
        except (ValueError, RecursionError):
            answer = None
        text = data.decode(errors="replace")
        shown = text.replace(self._api_key, "***") if self._api_key else text
        return Reply(status, answer, shown[:SHOWN_MAX], after)

    async def close(self) -> None:
        await self._session.close()
