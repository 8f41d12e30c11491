from collections.abc import Iterator

import pytest

from tests.sglang.servers import Served, serve


@pytest.fixture(scope="session")
def tied_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Tensor 1, tied embeddings."""
    yield from serve("qwen2_tied", 1, tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="session")
def split_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Tensor 2, with a head of its own, experts cut over both ranks, and padding in the vocabulary and in experts."""
    yield from serve("qwen3_moe", 2, tmp_path_factory.mktemp("split"))


@pytest.fixture(scope="session")
def latent_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Tensor 2, latent attention, a dense layer with padding, and three of routed and shared experts."""
    yield from serve("deepseek_v3", 2, tmp_path_factory.mktemp("latent"))


@pytest.fixture(scope="session")
def mistral_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Tensor 2, llama's layers under a name of their own."""
    yield from serve("mistral", 2, tmp_path_factory.mktemp("mistral"))
