import pytest

from tests.engines.conftest import SHARED
from tests.engines.servers import Served, Servers


@pytest.fixture(scope="session")
def tied_server(servers: Servers, request: pytest.FixtureRequest) -> Served:
    """Tensor 1, tied embeddings."""
    if any("split_server" in getattr(item, "fixturenames", ()) for item in request.session.items):
        servers.begin(*SHARED["split"])  # both start at once
    return servers.get(*SHARED["sglang"])


@pytest.fixture(scope="session")
def split_server(servers: Servers) -> Served:
    """Tensor 2, with a head of its own, experts cut over both ranks, and padding in the vocabulary and in experts."""
    return servers.get(*SHARED["split"])


@pytest.fixture(scope="session")
def latent_server(servers: Servers) -> Served:
    """Tensor 2, latent attention, a dense layer with padding, and three of routed and shared experts."""
    return servers.get("sglang", "deepseek_v3", 2)


@pytest.fixture(scope="session")
def mistral_server(servers: Servers) -> Served:
    """Tensor 2, llama's layers under a name of their own."""
    return servers.get("sglang", "mistral", 2)
