"""Meanings of judges' answers, and results of comparisons."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.reward.http_post import RETRY_AFTER_SECONDS_MAX, retry_after
from megagrpo.reward.judging.rubric import FieldConfig, PatternConfig, UnreadableError, reader
from megagrpo.reward.verifiers.judges import bradley_terry, chosen_pairs, win_rates

NOTHING = None


VERDICTS = {
    "score": [
        ("Score: 7", 0.7),
        ("score: 3\n\nOn reflection:\n**Score:** 8", 0.8),
        ("Rating: [[5]]", 0.5),
        ('{"score": 2.5}', 0.25),
        ("Score: 9/10.", 0.9),
        ("<think>Score: 1</think>Score: 10", 1.0),
        ("Score: 0", 0.0),
        ("Score: 4/5", NOTHING),  # of another scale
        ("Score: 11", NOTHING),
        ("Score: -1", NOTHING),
        ("Score: 7-8", NOTHING),
        ("Score: 18-19", NOTHING),
        ("I would say seven.", NOTHING),
        ("The score could be 7", NOTHING),
        ("", NOTHING),
    ],
    "yes_no": [
        ("yes", 1),
        ("**No.**", 0),
        ("Yes, there is no error.", NOTHING),
        ("No step is wrong. Yes it is right.\nVerdict: yes", 1),
        ("It looks right, yes.\nVerdict: No", 0),
        ("I see a mistake.\nSo: no", NOTHING),
        ("Yes.\nIt is right.", 1),
        ("Yes.\nOr rather:\nno", NOTHING),
        ('{"verdict": "no", "why": "yes was wrong"}', 0),
        ("Verdict: no\nExplanation: the correct answer is yes.", 0),
        ("Verdict: yes, since the answer is no", 1),
        ("The answer is yes", 1),
        ("Verdict: yes\nThis verdict is final", 1),
        ("Verdict: not yes", NOTHING),
        ("Verdict: yes and no", NOTHING),
        ("The verdict is not yes.\nyes", NOTHING),
        ("I cannot confirm a yes.", NOTHING),
        ("The response should have said yes.", NOTHING),
        ("yes and no", NOTHING),
        ("So is it yes or no?", NOTHING),
        ("notes", NOTHING),
        ("", NOTHING),
    ],
    "a_b": [
        ("[[A]]", 1),
        ("A is good, but\n[[B]]", 0),
        ("[[C]]", 0.5),
        ("Verdict: tie", 0.5),
        ("The winner is Response B", 0),
        ("Verdict: **A**", 1),
        ("Both are fine.\n\nB.", 0),
        ("Verdict: B, because the correct answer is A", 0),
        ("The better answer is A.", 1),
        ("Verdict: A or B", NOTHING),
        ("Verdict: neither\nThe answer is A", NOTHING),
        ("A response that I like", NOTHING),
        ("Both", NOTHING),
    ],
}


@pytest.mark.parametrize(("kind", "text", "verdict"), [(kind, *row) for kind, rows in VERDICTS.items() for row in rows])
def test_a_verdict_is_read_only_where_it_is_said_and_the_last_one_counts(kind, text, verdict):
    check(reader(kind, None), text, verdict)


def test_a_pattern_reads_its_first_group_in_its_last_match_on_a_scale():
    read = reader(PatternConfig(pattern=r"Grade (\S+)"), [1, 5])
    for text, verdict in (("Grade 1, no: Grade 5", 1), ("Grade 2", 0.25), ("Grade 6", NOTHING), ("Grade x", NOTHING)):
        check(read, text, verdict)
    check(reader(PatternConfig(pattern=r"Grade (\S+)"), [5, 1]), "Grade 2", 0.75)  # a grade as in schools
    check(reader(PatternConfig(pattern=r"better: (\w+)"), None), "better: tie", 0.5)


def test_a_pattern_that_never_ends_is_given_up():
    check(reader(PatternConfig(pattern=r"(a|aa)+$"), None), "a" * 60 + "b", NOTHING)


def test_a_field_is_read_in_the_last_object_that_has_it():
    read = reader(FieldConfig(field="result.score"), [0, 4])
    for text, verdict in (
        ('```json\n{"result": {"score": 3}}\n```', 0.75),
        ('{"result": {"score": 1}} or {"result": {"score": "2"}} {"other": 1}', 0.5),
        ('{"result": {"score": true}}', 1),
        ('{"result": {"score": NaN}}', NOTHING),
        ('{"result": {"score": 1' + "0" * 400 + "}}", NOTHING),
        ('{"result": {"score": null}}', NOTHING),
        ('{"result": [' * 3000, NOTHING),
        ("{{{", NOTHING),
    ):
        check(read, text, verdict)


def check(read, text, verdict):
    if verdict is NOTHING:
        with pytest.raises(UnreadableError):
            read(text)
    else:
        assert read(text) == pytest.approx(verdict)


def test_retry_after_is_seconds_or_a_date():
    assert retry_after("1.5") == 1.5
    assert retry_after("1e9") == RETRY_AFTER_SECONDS_MAX
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert [retry_after(header) for header in (None, "soon", "nan")] == [None, None, None]


# --- pairs ------------------------------------------------------------------------------------------------------------


@given(st.integers(2, 12), st.integers(1, 80), st.text(max_size=5))
def test_chosen_pairs_are_different_and_spread_evenly(count, most, seed):
    pairs = chosen_pairs(count, most, seed)
    everything = count * (count - 1) // 2
    assert len(set(pairs)) == len(pairs) == min(most, everything)
    assert all(0 <= i < j < count for i, j in pairs)
    assert pairs == chosen_pairs(count, most, seed)
    often = [sum(i in pair for pair in pairs) for i in range(count)]
    assert max(often) - min(often) <= 2
    if most >= count:
        assert min(often) >= (1 if count == 2 else 2) or len(pairs) == everything


comparisons = st.integers(2, 6).flatmap(
    lambda count: st.tuples(
        st.just(count),
        st.lists(
            st.tuples(st.integers(0, count - 1), st.integers(0, count - 1), st.sampled_from([0.0, 0.5, 1.0])).filter(
                lambda found: found[0] != found[1]
            ),
            min_size=1,
            max_size=30,
        ),
    )
)


@given(comparisons)
def test_scores_of_comparisons_are_shares_and_turn_over_with_them(drawn):
    count, found = drawn
    turned = [(i, j, 1 - share) for i, j, share in found]
    exchanged = [(j, i, 1 - share) for i, j, share in found]
    for score in (bradley_terry, win_rates):
        forth, back = score(count, found), score(count, turned)
        assert forth == pytest.approx(score(count, exchanged))
        played = {i for pair in found for i in pair[:2]}
        for i in range(count):
            assert (forth[i] is None) == (i not in played)
            if forth[i] is not None:
                assert 0 <= forth[i] <= 1
                assert forth[i] + back[i] == pytest.approx(1, abs=1e-6)


@given(comparisons)
def test_strengths_are_the_most_likely_ones(drawn):
    """At the maximum what each has won is what its strength says, with one win and one loss of half weight."""
    count, found = drawn
    scores = bradley_terry(count, found)
    for i in range(count):
        if scores[i] is None:
            continue
        strength = [None if score is None else score / (1 - score) for score in scores]
        expected = 1.0 * scores[i]  # of two comparisons of half weight with mean strength
        won = 0.5
        for a, b, share in found:
            if i in (a, b):
                other = b if i == a else a
                expected += strength[i] / (strength[i] + strength[other])
                won += share if i == a else 1 - share
        assert expected == pytest.approx(won, abs=1e-5)
