"""What a weight sync says when digests disagree."""

from __future__ import annotations

from megagrpo.cluster.weight_sync import digest_problems, replica_problems
from megagrpo.weights.boxes import Box


def test_equal_digests_are_no_problem() -> None:
    assert not digest_problems("engine 0", {"a": 1, "b": 2}, {"a": 1, "b": 2})


def test_a_digest_that_differs_names_the_tensor_and_the_engine() -> None:
    (problem,) = digest_problems("engine 3", {"a": 1, "b": 2}, {"a": 1, "b": 5})
    assert problem.where == "b on engine 3 after the sync"
    assert "0000000000000005" in problem.given
    assert "0000000000000002" in problem.needed


def test_a_tensor_that_did_not_arrive_or_was_not_sent_is_named() -> None:
    missing, unknown = digest_problems("engine 0", {"a": 1}, {"b": 1})
    assert missing.given == "nothing"
    assert unknown.needed == "no such tensor"


def test_replicas_that_drifted_apart_name_their_ranks() -> None:
    shared, own = Box("norm", (0,), (4,)), Box("q", (0, 0), (2, 2))
    assert not replica_problems({"train rank 0": {shared: 7, own: 1}, "train rank 1": {shared: 7}})
    (problem,) = replica_problems(
        {"train rank 0": {shared: 7}, "train rank 1": {shared: 7}, "train rank 2": {shared: 8}}
    )
    assert "train rank 0, train rank 1" in problem.given
    assert "train rank 2" in problem.given
