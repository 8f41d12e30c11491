"""A rollout's conversations: one branch, one answer, or not trained."""

from __future__ import annotations

import asyncio
import copy

from megagrpo.agents.chat import TOOL, Chat
from tests.agents.families import FAMILIES, chat_of, tokenizer_of
from tests.agents.scripted import Served, served, with_gateway
from tests.agents.test_gateway import calls_then_answers, numbered, result, run, user


@with_gateway(numbered)
async def test_several_answers_are_branches_and_those_passed_over_are_not_trained(to: Served) -> None:
    key = to.open()
    _, answer = await to.post(key, [user("x")], n=4)
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert len(set(texts)) == 4
    best = to.open()
    await to.post(best, [user("x")], n=4)
    _, all_four = await to.close(best)
    assert all_four.agent is not None
    assert len(all_four.agent.branches) == 4
    await to.said(key, [user("x"), {"role": "assistant", "content": texts[2]}, user("go on")])
    run = await to.run(key)
    (branch,) = run.branches
    assert texts[2] in to.engine.chat.text(branch.tokens)
    assert run.counts["turns_unused"] == 3


@with_gateway(numbered)
async def test_edited_histories_other_tools_forks_and_sub_agents_are_told_apart(to: Served) -> None:
    key = to.open()
    main = [user("main")]
    main += [await to.said(key, main, tools=[TOOL]), user("next")]
    subs = [[{"role": "system", "content": f"sub-agent {number}"}, user("do")] for number in range(3)]
    await asyncio.gather(*(to.said(key, talk, tools=[TOOL]) for talk in subs))
    last = await to.said(key, main, tools=[TOOL])
    await to.said(key, [*main[:2], user("instead")], tools=[TOOL])
    await to.said(key, [main[0], {"role": "assistant", "content": "in short"}, user("next")], tools=[TOOL])
    await to.said(key, [*main, last, user("more")])
    run = await to.run(key)
    counts = run.counts
    assert len(run.branches) == 7
    assert counts["branch/history"] == 4
    assert counts["branch/fork"] == 1
    assert counts["branch/tools"] == 1

    forked, talk = to.open(), [user("main")]
    talk.append(await to.said(forked, talk))
    for other in ("next", "instead"):
        await to.said(forked, [*talk, user(other)])
    run = await to.run(forked)
    assert run.counts["branch/fork"] == 1
    assert "tokens_rerendered" not in run.counts


@with_gateway(calls_then_answers)
async def test_the_answer_of_a_rollout_is_the_last_one_of_its_task_with_other_tools_or_an_edited_history(
    to: Served,
) -> None:
    final = to.open()
    talk = [user("two and two?")]
    talk.append(await to.said(final, talk, tools=[TOOL]))
    talk.append(result(talk[-1]))
    said = await to.said(final, talk, tools=[TOOL], tool_choice="none")
    _, sample = await to.close(final)
    run = sample.agent
    assert run is not None
    assert sample.text.removesuffix("<|im_end|>") == said["content"]
    assert [one["role"] for one in run.messages] == ["user", "assistant", "tool", "assistant"]
    assert run.counts["branch/tools"] == 1

    compacted = to.open()
    start = [{"role": "system", "content": "You help."}, user("two and two?")]
    await to.said(compacted, start, tools=[TOOL])
    said = await to.said(compacted, [*start, user("So far: <tool_response>.")], tools=[TOOL])
    await to.said(compacted, [{"role": "system", "content": "A sub-agent."}, user("Is it?")], tools=[TOOL])
    assert (await to.run(compacted)).messages[-1]["content"] == said["content"]


@with_gateway(numbered)
async def test_what_an_agent_asks_beside_its_task_is_not_the_rollouts_answer(to: Served) -> None:
    task = [user("two and two?")]
    key = to.open(task=task)
    await to.said(key, [user("A title for: two and two?")])
    said = await to.said(key, [{"role": "system", "content": "You help."}, *task])
    await to.said(key, [user("Was that right?")])
    assert (await to.run(key)).messages[-1]["content"] == said["content"]


@with_gateway(numbered)
async def test_several_answers_are_alternatives_also_if_the_agent_goes_on_with_other_tools(to: Served) -> None:
    key = to.open()
    _, answer = await to.post(key, [user("x")], n=3, tools=[TOOL])
    await to.said(key, [user("x"), answer["choices"][1]["message"], user("go on")])
    assert (await to.run(key)).counts["turns_unused"] == 2


def test_a_rollout_that_fails_an_audit_is_rendered_whole_from_then_on() -> None:
    async def work() -> None:
        tokenizer = copy.deepcopy(tokenizer_of("chatml"))
        tokenizer.chat_template = FAMILIES["chatml"].template.replace(
            "{{ m.role }}\n", "{{ m.role }}\n{{ loop.index }}. "
        )
        chat = Chat(tokenizer, chat_of("chatml").stop_tokens)
        async with served(chat, numbered, audited=0.25) as to:
            failed = 0
            for number in range(10):
                key, talk = to.open(), [user(f"question {number}")]
                for _ in range(6):
                    talk += [await to.said(key, talk), user("go on")]
                run = await to.run(key)
                branches = [event["branch"] for event in run.events]
                if "audit" in branches:
                    failed += 1
                    assert set(branches[branches.index("audit") :]) == {"audit"}
                    whole = chat.render(talk[:-2])
                    assert chat.text(run.branches[-1].tokens).startswith(whole)
            assert failed

    run(work())
