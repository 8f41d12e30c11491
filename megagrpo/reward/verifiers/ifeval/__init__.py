"""Instruction following: constraints that a program can check, of IFEval, IFTrain and open-instruct."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megagrpo.reward.answer_text import after_thinking
from megagrpo.reward.functions import RewardCallable
from megagrpo.reward.verifiers.ifeval import formats, text


def make(mode: str = "strict", score: str = "share") -> RewardCallable:
    r"""Makes a reward function: the share of the row's constraints that are kept, or 1.0 if all are, else 0.0.

    strict: the response as it is. loose: a constraint is kept if any of eight variants of the response keeps it:
    without its first line, last line or both, and each of these without asterisks (arXiv:2311.07911, section 2.2).

    The constraints are JSON in the ground truth, or fields of extra_info: `instruction_id_list` and `kwargs` as IFEval
    has them, `instruction_id` and `kwargs` (open-instruct's IF-multi-constraints), or `func_name` with arguments
    (RLVR-IFeval). If a response reasons, what follows the last `</think>` counts. An empty one keeps nothing.

    Metrics: `all`, `share`, and the outcome of each constraint under its id with `_` in place of `:`, the mean where
    one is given twice. Raises ValueError for another mode or score, and if nltk or langdetect is not installed; the
    function raises it for constraints that are unknown or lack an argument.

    >>> function = make()
    >>> truth = '{"instruction_id_list": ["punctuation:no_comma", "length_constraints:number_words"],'
    >>> truth += ' "kwargs": [{}, {"num_words": 3, "relation": "at least", "keyword": null}]}'
    >>> function("<think>Well, three.</think>No comma here.", truth, {})["score"]
    1.0
    >>> function("Yes, two", truth, {}) == {
    ...     "score": 0.0, "share": 0.0, "all": 0.0, "punctuation_no_comma": 0.0, "length_constraints_number_words": 0.0
    ... }
    True
    >>> make("loose")("Sure, here it is:\nNo comma here.", truth, {})["score"]
    1.0
    """
    if mode not in ("strict", "loose"):
        raise ValueError(f"mode is {mode!r}, not strict or loose")
    if score not in ("share", "all"):
        raise ValueError(f"score is {score!r}, not share or all")
    text.load()

    def ifeval(
        response: str, ground_truth: str, extra_info: Mapping[str, Any], prompt_text: str = ""
    ) -> Mapping[str, float]:
        instructions = formats.read(ground_truth, extra_info)
        answer = answer_of(response, instructions.strip, prompt_text)
        texts = [variant for variant in (variants(answer) if mode == "loose" else [answer]) if variant.strip()]
        outcomes: dict[str, list[bool]] = {}
        for constraint in instructions.constraints:
            kept = any(constraint.holds(variant) for variant in texts)
            outcomes.setdefault(constraint.name, []).append(kept)
        flat = [kept for several in outcomes.values() for kept in several]
        parts = {"share": sum(flat) / len(flat), "all": float(all(flat))}
        return {"score": parts[score], **parts, **{name: sum(kept) / len(kept) for name, kept in outcomes.items()}}

    return ifeval


def answer_of(response: str, strip: bool, prompt_text: str = "") -> str:
    """Returns the part of a response that counts: all, or the text after its reasoning, without `<answer>` tags."""
    answer = after_thinking(response, prompt_text)
    if not strip and answer == response:
        return response
    return answer.replace("<answer>", "").replace("</answer>", "").strip()


def variants(response: str) -> list[str]:
    r"""Returns the eight texts of the loose mode, each once.

    >>> variants("Sure:\n*b*\nBye")
    ['Sure:\n*b*\nBye', '*b*\nBye', 'Sure:\n*b*', '*b*', 'Sure:\nb\nBye', 'b\nBye', 'Sure:\nb', 'b']
    """
    lines = response.split("\n")
    cut = [response, *("\n".join(lines[part]).strip() for part in (slice(1, None), slice(-1), slice(1, -1)))]
    return list(dict.fromkeys([*cut, *(text.replace("*", "") for text in cut)]))
