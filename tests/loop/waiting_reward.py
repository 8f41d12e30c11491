"""digits_reward's, which waits while the file named in MEGAGRPO_TEST_HOLD exists, and says so."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from tests.loop import digits_reward


def share_of_digits(data_source: str, response: str, ground_truth: str, extra_info: dict[str, Any]) -> dict[str, float]:
    hold = Path(os.environ["MEGAGRPO_TEST_HOLD"])
    while hold.exists():
        hold.with_suffix(".reached").touch()
        time.sleep(0.02)
    return digits_reward.share_of_digits(data_source, response, ground_truth, extra_info)
