from collections.abc import Iterator

import pytest

from tests.vllm.servers import Served, serve


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of one rank, of a model with tied embeddings. Its first weights are meaningless."""
    yield from serve("qwen2_tied", 1, tmp_path_factory.mktemp("vllm"))
