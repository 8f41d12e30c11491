from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.engines.servers import Served, Servers

SHARED = {"sglang": ("sglang", "qwen2_tied", 1), "split": ("sglang", "qwen3_moe", 2), "vllm": ("vllm", "qwen2_tied", 1)}
"""Kind, family and tensor parallelism of servers. Of SGLang's, tests/sglang has the same."""
EACH = ["sglang", pytest.param("vllm", marks=pytest.mark.needs("vllm"))]


@pytest.fixture(scope="module", params=EACH)
def served(request: pytest.FixtureRequest, servers: Servers) -> Served:
    """A server of each kind, of a model with tied embeddings."""
    return servers.get(*SHARED[request.param])


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as pool:
        yield pool
