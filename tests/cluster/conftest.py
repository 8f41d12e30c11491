"""The inputs of the small run, and one uninterrupted run of it, as the tests of whole runs have them."""

from __future__ import annotations

from tests.loop.conftest import finished as finished
from tests.loop.conftest import inputs as inputs
