"""A plan on a terminal: every rank is somewhere, nothing is too wide or too long."""

import io
import re

import pytest
from rich.console import Console

from megagrpo.layout.parallel import ParallelLayout
from megagrpo.plan.advice import impossible
from megagrpo.plan.parameters import stages, total_parameters
from megagrpo.plan.plan import Plan
from megagrpo.plan.show.terminal import draw, rows
from megagrpo.plan.units import byte_text, second_text, spans
from tests.plans import ON_2048, architecture, plan, planned, recipe


def drawn(of: Plan, *, width: int = 80, encoding: str = "utf-8", terminal: bool = False) -> str:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    draw(of, None, Console(file=stream, width=width, force_terminal=terminal, highlight=False))
    stream.seek(0)
    return stream.read()


def section(text: str, title: str) -> list[str]:
    return text.partition(f"\n{title}")[2].partition("\n\n")[0].splitlines()


@pytest.fixture(scope="module")
def of_70b() -> Plan:
    return plan()


@pytest.fixture(scope="module")
def of_671b() -> Plan:
    return plan(ON_2048)


def test_layers_embedding_and_head_are_where_the_stages_are(of_70b: Plan) -> None:
    lines = section(drawn(of_70b), "where")
    assert lines[1].split()[:7] == ["node", "GPU", "rank", "stage", "layers", "tensor", "data"]
    assert re.fullmatch(r"0 +0-7 +0-7 +0 +embedding, 0-39 +0-7 +0 +0 +0-7 *", lines[2])
    assert re.fullmatch(r"15 +0-7 +120-127 +1 +40-79, head +0-7 +7 +15 +0-7 *", lines[17])
    assert "tensor 8: ranks 0-7, each group within a node" in lines
    assert "pipeline 2: ranks 0, 64, each group over 2 nodes" in lines


def test_summaries_are_in_one_column_and_tasks_are_readable() -> None:
    task = {"reasoning_gym": "leg_counting", "size": 5, "arguments": {"min_animals": 2}}
    of = plan({"eval.sets": {"held_out": {"files": [task]}}})
    lines = drawn(of).partition("\n\n")[0].splitlines()
    assert len({line.index(f" {text}") for line, text in zip(lines, of.summary.values(), strict=True)}) == 1
    assert '{"min_animals": 2}' in of.summary["evaluation held_out"]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_pictures_fit_the_width_in_plain_text_where_there_is_no_terminal(
    of_671b: Plan, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = drawn(of_671b, width=width)
    assert len(section(text, "where")) < 50
    assert len(text.splitlines()) < 150
    _, _, pictures = text.partition("\nwhere")
    pictures = pictures.partition("\nunwise")[0]
    assert max(map(len, pictures.splitlines())) <= min(width, 120)
    assert "\x1b" not in pictures
    assert "\x1b" in drawn(of_671b, width=width, terminal=True)


def test_bars_are_as_long_as_the_memory_they_show(of_70b: Plan) -> None:
    assert re.search(r"update +#+\.+\|", drawn(of_70b, encoding="ascii"))
    card = of_70b.machines.gpu.memory_bytes
    kind = max(of_70b.memory, key=lambda kind: kind.fullest.bytes)
    for phase in kind.phases:
        line = next(line for line in drawn(of_70b).splitlines() if line.startswith(f"  {phase.phase} "))
        assert abs(line.count("█") - 30 * phase.bytes / card) < 1
        assert f"{byte_text(phase.bytes)}, {phase.bytes / card:.0%}" in line


def test_a_sync_is_told_by_kind_of_link_with_its_lower_bound(of_70b: Plan) -> None:
    lines = [line.split() for line in section(drawn(of_70b, width=120), "a step")]
    first = lines.index(["weight_sync,", "busiest", "bytes", "seconds", "least", "bytes", "least", "seconds", "ratio"])
    assert lines[first + 1] == ["network", "8.21", "GiB", "470", "ms", "8.21", "GiB", "176", "ms", "2.7"]
    assert [line[:3] for line in lines[first + 2 : first + 4]] == [["within", "a", "node"], ["within", "a", "GPU"]]


def test_the_start_says_what_engines_without_weights_do_not_read(of_70b: Plan) -> None:
    weights = total_parameters(of_70b.architecture) * 2
    start = of_70b.summary["start"]
    assert start.startswith(byte_text(weights))
    assert f"spares {byte_text(of_70b.grpo.rollout.engines * weights)} " in start


def test_what_is_too_much_is_marked_beyond_the_card() -> None:
    of = plan(train__recompute="none", train__layout={"tensor": 8, "data": 16}, cluster__gpu="A100-40GB")
    assert of.lacking_bytes
    assert impossible(of)
    text = drawn(of)
    assert re.search(r"update +█+│█+ .*too much", text)


def test_without_a_kind_of_gpu_there_is_memory_and_a_hint() -> None:
    text = drawn(plan(cluster__gpu=None))
    assert "add cluster.gpu=H100" in text
    assert "parameters" in text
    assert "tokens/s/GPU" not in text
    assert "%" not in "".join(section(text, "memory"))


def test_cpu_recipes_have_processes_and_no_time() -> None:
    of = plan(cluster={"device": "cpu"}, train__offload=[], rollout__layout={"tensor": 2}, rollout__engines=1)
    text = drawn(of)
    assert "process" in text
    assert "node" not in section(text, "where")[1]
    assert "cluster.gpu" not in text


def test_every_place_is_in_one_row() -> None:
    for count in (1, 2, 16, 17, 64):
        of = recipe(train__layout={"tensor": 1, "data": count}, rollout__layout={"tensor": 1}, rollout__engines=count)
        every = planned(of).device_map
        assert [mapped for row in rows(every) for mapped in row] == list(every)


def test_engines_of_their_own_lie_behind_the_ranks() -> None:
    of = recipe(cluster__placement="disaggregated", train__offload=[], rollout__engines=4)
    every = planned(of).device_map
    alone = [mapped for mapped in every if mapped.rank is None]
    assert [mapped.device for mapped in alone] == list(range(128, 160))
    assert [mapped.engines for mapped in alone[::8]] == [(0,), (1,), (2,), (3,)]
    assert [mapped.engine_rank for mapped in alone[:8]] == list(range(8))
    assert rows(every)[-1][0].stage == -1


def test_groups_say_how_many_nodes_the_widest_of_them_reaches_over() -> None:
    of = recipe(train__layout={"tensor": 4, "context": 3, "data": 2}, cluster__gpus_per_node=8, rollout__engines=3)
    found = {axis.name: axis for axis in planned(of).axes}
    assert found["tensor"].nodes == 1
    assert found["context"].example == (0, 4, 8)
    assert found["context"].nodes == 2
    assert found["data"].nodes == 2
    of = recipe(train__layout={"tensor": 6, "data": 4}, cluster__gpus_per_node=8)
    assert planned(of).axes[0].nodes == 2  # ranks 6-11


def test_interleaved_chunks_of_a_stage_are_all_named() -> None:
    of = recipe()
    layout = ParallelLayout(pipeline=2, virtual_pipeline=2)
    assert [stage.text for stage in stages(len(architecture(of).layers), layout)] == [
        "embedding, 0-19, 40-59",
        "20-39, 60-79, head",
    ]


def test_spans_and_units() -> None:
    assert spans([3, 1, 2, 7, 9, 8]) == "1-3, 7-9"
    assert spans([]) == ""
    texts = [byte_text(number) for number in (0, 512, 2**20, 79 * 2**30, 3 * 2**40)]
    assert texts == ["0 B", "512 B", "1.00 MiB", "79.0 GiB", "3.00 TiB"]
    texts = [second_text(number) for number in (0, 1e-5, 0.012, 3.42, 119, 150, 7200, 2 * 86400)]
    assert texts == ["0 s", "10.0 us", "12.0 ms", "3.42 s", "119 s", "2.50 min", "2.00 h", "2.00 days"]
