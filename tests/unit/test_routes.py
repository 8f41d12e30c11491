"""Routes: their rows, faults and digests."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.errors import EngineError
from megagrpo.routes import Routes, RouteSizes, digest_of, token_digests

SIZES = st.tuples(st.integers(0, 12), st.integers(1, 5), st.integers(1, 4), st.integers(4, 300), st.integers(0, 2**32))


def random_routes(tokens: int, layers: int, per_token: int, experts: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    chosen = [random.permutation(experts)[:per_token] for _ in range(tokens * layers)]
    return np.array(chosen, np.int64).reshape(tokens, layers, per_token)


@given(SIZES)
@settings(deadline=None)
def test_routes_are_packed_in_the_fewest_bytes_and_keep_their_values(sizes: tuple[int, int, int, int, int]) -> None:
    experts = random_routes(*sizes)
    routes = Routes.of(experts)
    assert (routes.experts == experts).all()
    assert routes.experts.itemsize == (1 if experts.max(initial=0) < 256 else 2)
    RouteSizes(*sizes[1:4]).require(routes.experts, "sample", sizes[0])


@given(SIZES, st.integers(0, 12), st.integers(0, 5))
@settings(deadline=None)
def test_digests_of_parts_add_up_to_that_of_the_whole(
    sizes: tuple[int, int, int, int, int], token: int, layer: int
) -> None:
    experts = random_routes(*sizes)
    tokens, layers = np.arange(sizes[0]), np.arange(sizes[1])
    parts = [
        token_digests(experts[at][:, of], tokens[at], layers[of]).sum(dtype=np.uint64)
        for at in (slice(token), slice(token, None))
        for of in (slice(layer), slice(layer, None))
    ]
    assert int(np.array(parts, np.uint64).sum(dtype=np.uint64)) == digest_of(experts)


@given(SIZES.filter(lambda sizes: sizes[0] > 1 and sizes[2] > 1), st.data())
@settings(deadline=None)
def test_digests_see_shifts_and_exchanges(sizes: tuple[int, int, int, int, int], data: st.DataObject) -> None:
    experts = random_routes(*sizes)
    axis = data.draw(st.integers(0, 2))
    moved = np.roll(experts, 1, axis)
    assert (digest_of(moved) == digest_of(experts)) == bool((moved == experts).all())


def test_joined_routes_keep_the_rows_of_the_pass_that_sampled() -> None:
    first, later = random_routes(4, 3, 2, 8, 0), random_routes(9, 3, 2, 8, 1)
    joined = Routes.of(first).joined(Routes.of(later), "sample")
    assert (joined.experts == np.concatenate([first, later[4:]])).all()
    assert joined.digest == digest_of(joined.experts)
    assert (joined.before(6, "sample").experts == joined.experts[:5]).all()
    assert joined.before(10, "sample") is joined


def test_rows_are_counted_and_none_is_cut_or_joined_that_was_not_sent() -> None:
    routes = Routes.of(random_routes(6, 3, 2, 8, 0))
    routes.require_rows("sample", 6)
    changed = Routes(np.roll(routes.experts, 1, 0), routes.digest)
    faults: list[Callable[[], object]] = [
        lambda: routes.require_rows("sample", 5),
        lambda: routes.require_rows("sample", 7),
        lambda: changed.before(6, "sample"),
        lambda: changed.joined(routes, "sample"),
    ]
    for fault in faults:
        with pytest.raises(EngineError, match="sample"):
            fault()


@pytest.mark.parametrize(
    ("change", "token"),
    [
        (lambda experts: experts[1:], None),
        (lambda experts: np.concatenate([experts, experts[-1:]]), None),
        (lambda experts: experts[:, :2], None),
        (lambda experts: np.where(np.arange(6)[:, None, None] == 4, 0, experts), "token 4"),
        (lambda experts: np.where(np.arange(6)[:, None, None] == 2, [7, 8], experts), "token 2"),
    ],
    ids=["one missing", "one too many", "a layer missing", "repeated expert", "expert that is not there"],
)
def test_faults_of_routes_are_errors_that_name_the_place(change: object, token: str | None) -> None:
    experts = change(random_routes(6, 3, 2, 8, 0))  # type: ignore[operator]
    with pytest.raises(EngineError) as caught:
        RouteSizes(3, 2, 8).require(experts, "sample 3 of prompt p", 6)
    assert "sample 3 of prompt p" in str(caught.value)
    assert token is None or token in str(caught.value)
