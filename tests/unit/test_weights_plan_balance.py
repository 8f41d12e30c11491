"""Even shares against a maximum flow, on random sets of holders."""

from __future__ import annotations

from collections.abc import Mapping

import networkx as nx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.weights.planning.routes import Holders, even_shares, least_load

SETS = st.frozensets(st.integers(0, 9), min_size=1, max_size=6).map(lambda found: tuple(sorted(found)))
DEMANDS = st.dictionaries(SETS, st.integers(0, 100_000), min_size=1, max_size=12)


def loads_of(shares: Mapping[Holders, np.ndarray]) -> np.ndarray:
    loads = np.zeros(64, np.int64)
    for holders, share in shares.items():
        loads[list(holders)] += share
    return loads


def optimum(demands: Mapping[Holders, int]) -> float:
    """The smallest largest load for which the flow from the sets through their holders carries every demand."""
    low, high = 0.0, float(sum(demands.values()))
    while high - low > 1e-4 * high:
        middle = (low + high) / 2
        graph = nx.DiGraph()
        graph.add_nodes_from(["from", "to"])
        for holders, demand in demands.items():
            graph.add_edge("from", holders, capacity=demand)
            for holder in holders:
                graph.add_edge(holders, holder)
                graph.add_edge(holder, "to", capacity=middle)
        enough = nx.maximum_flow_value(graph, "from", "to") >= sum(demands.values()) * (1 - 1e-9)
        low, high = (low, middle) if enough else (middle, high)
    return high


@settings(max_examples=40)
@given(demands=DEMANDS)
def test_the_largest_load_is_the_smallest_possible(demands: dict[Holders, int]) -> None:
    shares = even_shares(demands)
    assert all((share >= 0).all() and share.sum() == demands[holders] for holders, share in shares.items())
    assert shares.keys() == demands.keys()
    best = optimum(demands)
    assert loads_of(shares).max() <= 1.02 * best + len(demands)
    assert least_load(demands, loads_of(shares)[:10].astype(float)) <= 1.001 * best  # a bound, never above


def test_a_chain_of_neighbours_is_levelled_to_its_ends() -> None:
    """The hardest kind: what the first has too much of has to move through everyone."""
    demands = {(index, index + 1): 1000 for index in range(30)} | {(0,): 30_000}
    loads = loads_of(even_shares(demands))[:31]
    assert loads[0] == 30_000  # cannot be less
    demands = {(index, index + 1): 2000 for index in range(30)} | {(0,): 2000}
    loads = loads_of(even_shares(demands))[:31]
    assert loads.max() <= 1.02 * 2000


def test_replicas_share_evenly_also_where_another_rank_is_the_bottleneck() -> None:
    shares = even_shares({(0,): 1000, (1, 2, 3, 4): 400})
    assert shares[1, 2, 3, 4].tolist() == [100, 100, 100, 100]
