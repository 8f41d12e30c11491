"""Tests with several training ranks."""

import megagrpo.megatron  # noqa: F401  before anything imports megatron.core
