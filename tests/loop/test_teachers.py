"""Teachers on real servers: asked as servers that run already, and in whole runs, in one of which theirs is killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from examples.demo.model import make_tokenizer
from megagrpo.cluster.reward_models import server_spec
from megagrpo.track.jsonl import PLAN_FILE
from megagrpo.trainer.batches import read_batch
from megagrpo.trainer.teachers import Teachers
from megagrpo.types import Group, Prompt, Sample, Score
from tests.engines.policy import logits_of
from tests.engines.servers import until_closed, vllm_python
from tests.loop import small_run
from tests.loop.test_reward_models import command, run_and_kill
from tests.tiny_run import recipe_with

pytestmark = pytest.mark.long
K = 32
STEPS = 3
STEPS_OF_KILLED = 8
"""More than those whose samples an asynchronous run has asked about when it ends its first step."""
TOP_K = {"objective": {"name": "teacher_top_k", "k": K}}
CHUNKS = {
    "sglang": {"sglang": {"chunked_prefill_size": 64}},
    "vllm": {"vllm": {"python": str(vllm_python()), "max_num_batched_tokens": 64, "enable_chunked_prefill": True}},
}
"""Settings of servers that read a sequence in several parts."""


def make_teacher(directory: Path, seed: int = 7) -> Path:
    """An untrained model with the tokenizer of small_run's model, of another size."""
    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=1024, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def check_teacher(directory: Path, prompt: Prompt, sample: Sample, k: int) -> None:
    """Checks that the sample has the logprobs that transformers gives its tokens, and the teacher's most likely ids."""
    found, tokens = sample.teacher, sample.tokens.tolist()
    assert found is not None
    expected = logits_of(directory, prompt.tokens, tokens).log_softmax(-1)
    of_tokens = expected[torch.arange(len(tokens)), tokens].numpy()
    assert np.abs(found.logprobs - of_tokens).max() < 1e-5
    assert found.ids.shape == (len(tokens), k)
    at_ids = expected.gather(1, torch.from_numpy(found.ids).long()).numpy()
    assert np.abs(found.ids_logprobs - at_ids).max(initial=0) < 1e-5
    assert np.abs(found.ids_logprobs - expected.topk(k).values.numpy()).max(initial=0) < 1e-5


@pytest.mark.parametrize("engine", ["sglang", pytest.param("vllm", marks=pytest.mark.needs("vllm"))])
def test_a_server_that_is_started_as_a_teacher_tells_logprobs_also_of_sequences_that_it_reads_in_parts(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_teacher(tmp_path / "model")
    lengths = f"track.directory={tmp_path}", "data.prompt_tokens_max=300", "rollout.response_tokens_max=300"
    of_objective = f"algorithm.distillation={json.dumps(TOP_K)}"
    given: dict[str, Any] = {"kind": "server", "engine": engine, "path": str(model), **CHUNKS[engine]}
    recipe = recipe_with(f"teachers.big={json.dumps(given)}", of_objective, *lengths)
    server = recipe.models_beside["teachers.big"].settings.engine_kind.server(  # type: ignore[union-attr]
        server_spec(recipe, "teachers.big", model, "cpu", "float32")
    )
    monkeypatch.setenv("TEACHER_KEY", server.api_key)
    asked = {"kind": "external", "engine": engine, "url": server.url, "tokenizer": str(model)}
    asked |= {"api_key_variable": "TEACHER_KEY"}
    external = recipe_with(f"teachers.big={json.dumps(asked)}", of_objective, *lengths)
    draws, vocabulary, said = np.random.default_rng(0), len(make_tokenizer()), list[str]()
    prompt = Prompt("p0", tuple(draws.integers(0, vocabulary, 250).tolist()), "sums", "2")
    lengths_of = (1, 64, 300, 257)
    samples = [
        Sample("p0", i, draws.integers(0, vocabulary, count, np.int32), np.zeros(count, np.float32),
               np.zeros(count, np.int32), "stop", "")
        for i, count in enumerate(lengths_of)
    ]  # fmt: skip
    teachers = Teachers(external, {}, say=said.append)
    with until_closed(server):
        teachers.contact()
        (group,) = teachers.beside(
            [Group(prompt, tuple(samples))], lambda groups: [Group(prompt, tuple(samples), (Score(1.0),) * 4)]
        )
        teachers.close()
    assert said == [f"teacher big: {model} at {server.url} ({engine})"]
    for sample in group.samples:
        check_teacher(model, prompt, sample, K)


def recipe_of(inputs: Path, output: Path, name: str, models: Mapping[str, Path], **distillation: Any) -> dict[str, Any]:
    """Each model is a teacher on a server. No functions score the training's responses; those of the held-out set have
    their own."""
    values = small_run.recipe(inputs, output, name)
    held_out = values["eval"]["sets"]["sums"] | values.pop("reward")
    served = {"kind": "server", "requests_at_once": 8}
    values["teachers"] = {teacher: {**served, "path": str(path)} for teacher, path in models.items()}
    values["algorithm"] = {"distillation": distillation}
    values["eval"] |= {"sets": {"sums": held_out}, "every_steps": STEPS}
    values["checkpoint"] = {"every_steps": 1, "keep_batches": STEPS}
    values["train"] |= {"total_steps": STEPS}
    return values


def check_run(directory: Path, models: Mapping[str, Path], steps: int, k: int) -> int:
    """Checks the saved samples of every step: each has the logprobs of its teacher, whose name is its source, or is
    masked and counted. Returns the number of those that are masked."""
    masked = dict.fromkeys(models, 0)
    samples = Counter[str]()
    for step in range(1, steps + 1):
        for group in read_batch(directory, step).sampled.all:
            name = group.prompt.data_source
            samples[name] += len(group.samples)
            for sample, score in zip(group.samples, group.scores, strict=True):
                if sample.teacher is None:
                    assert score.value is None
                    assert score.error.startswith(f"teacher {name}: ")
                    masked[name] += 1
                else:
                    check_teacher(models[name], group.prompt, sample, k)
                    assert score.value == (None if sample.given else 0)
    logged = [small_run.metrics(directory)[step] for step in range(1, steps + 1)]
    for name in models:
        assert masked[name] == sum(one[f"teacher/{name}/failed"] for one in logged)
        asked = sum(one[f"teacher/{name}/requests"] + one[f"teacher/{name}/cached"] for one in logged)
        assert asked >= samples[name] > 0
    return sum(masked.values())


def test_a_run_without_reward_functions_asks_the_teachers_about_every_sample_and_given_response_of_their_sources(
    inputs: Path, tmp_path: Path
) -> None:
    models = {name: make_teacher(tmp_path / name, seed) for seed, name in enumerate(("big", "other"))}
    given = {"share": 0.3, "column": "ground_truth"}
    values = recipe_of(inputs, tmp_path, "taught", models, objective={"name": "teacher_top_k", "k": 4})
    values["algorithm"]["distillation"] |= {"given_responses": given, "by_source": {name: name for name in models}}
    rows = pq.read_table(inputs / "train.parquet").to_pylist()
    sources = [row | {"data_source": [*models][at % 2]} for at, row in enumerate(rows)]
    pq.write_table(pa.Table.from_pylist(sources), tmp_path / "train.parquet")
    columns = {"extra_info": ["reward_model.ground_truth"]}
    values["data"]["train"] = [{"path": str(tmp_path / "train.parquet"), "columns": columns}]
    values |= {"schedule": "async", "cluster": values["cluster"] | {"placement": "disaggregated"}}
    small_run.train(small_run.write(values, tmp_path))
    directory = tmp_path / "taught"
    assert check_run(directory, models, STEPS, 4) == 0
    logged = small_run.metrics(directory)
    assert all(logged[step][f"teacher/{name}/retries"] == 0 for step in range(1, STEPS + 1) for name in models)
    assert any(logged[step]["teacher/given_share"] for step in range(1, STEPS + 1))
    assert "eval/sums/mean@1" in logged[STEPS]
    assert "teacher/big/requests" not in logged[0], "evaluations ask no teachers"


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_no_sample_is_lost_when_a_teachers_server_ends_or_stands_still(
    sent: signal.Signals, inputs: Path, tmp_path: Path
) -> None:
    models = {"sums": make_teacher(tmp_path / "teacher")}
    values = recipe_of(inputs, tmp_path, "killed", models) | {"schedule": "async"}
    values["cluster"] |= {"placement": "disaggregated"}
    values["train"] |= {"total_steps": STEPS_OF_KILLED}
    values["checkpoint"] |= {"keep_batches": STEPS_OF_KILLED}

    def kill(processes: list[psutil.Process]) -> None:
        servers = [process for process in processes if "sglang/launch.py" in command(process)]
        (first,) = (process for process in servers if os.getpgid(process.pid) == process.pid)
        os.killpg(first.pid, sent)

    directory = run_and_kill(values, tmp_path, kill)
    check_run(directory, models, STEPS_OF_KILLED, 0)
    log = directory / "logs" / "teacher_sums.log"
    assert log.read_text().count("server_args=") == 2, "it was started twice"
    assert not log.with_name(f"{log.name}.leftovers.json").exists(), "the second was closed"


def test_a_run_with_teachers_on_its_ranks_continues_and_is_replayed_with_the_same_numbers(
    inputs: Path, tmp_path: Path, ray: Mapping[str, str]
) -> None:
    """Rows of one source learn from another model in its own layout, others from the policy's average; both read a
    system message. Half of the first have given responses, some of them longer than sampled ones may be. The policy has
    adapters, and kept sets."""
    rows = pq.read_table(inputs / "train.parquet").to_pylist()
    sources = [
        row | {"data_source": ("sums", "others")[at % 2], "answer": f"={at * 10**at}" if at % 2 == 0 else None}
        for at, row in enumerate(rows)
    ]
    pq.write_table(pa.Table.from_pylist(sources), tmp_path / "train.parquet")
    values = small_run.recipe(inputs, tmp_path, "taught")
    values["data"]["train"] = [{"path": str(tmp_path / "train.parquet")}]
    teachers = {
        "big": {"kind": "ranks", "path": str(make_teacher(tmp_path / "teacher")), "layout": {"data": 2}},
        "mean": {"kind": "reference"},
    }
    objective = {"name": "full_vocabulary", "divergence": "jsd"}
    by_source = {"sums": "big", "others": "mean"}
    values["teachers"] = teachers
    values["algorithm"] |= {"reference": {"update_every_steps": 1, "share": 0.2}}
    system = {"system": "1", "system_tokens_max": 16}
    values["algorithm"]["distillation"] = {"objective": objective, "by_source": by_source, **system}
    values["algorithm"]["distillation"]["given_responses"] = {"share": 0.5, "column": "answer"}
    values["algorithm"]["correction"] = {"weights": {"name": "sequence"}}
    values["checkpoint"] |= {"keep_batches": small_run.STEPS}
    values["train"]["lora"] = {"rank": 4, "alpha": 8}
    values["rollout"]["top_p"] = 0.9
    recipe, directory = small_run.write(values, tmp_path), tmp_path / "taught"
    small_run.train(recipe, environment=ray)
    planned = json.loads(small_run.train(recipe, "--json", command="plan", errors=subprocess.DEVNULL))
    assert json.loads((directory / PLAN_FILE).read_text())["memory"] == planned["memory"]
    whole = small_run.metrics(directory)
    for step in (1, 4):
        assert 0 < whole[step]["teacher/others/divergence"] < whole[step]["teacher/sums/divergence"]

    tokenizer, longest, given = make_tokenizer(), values["rollout"]["response_tokens_max"], 0
    mismatches = {line["step"]: line["tokens"] for line in map(json.loads, (directory / "mismatch.jsonl").open())}
    for step in range(1, small_run.STEPS + 1):
        groups = read_batch(directory, step).sampled.groups
        answers = [group for group in groups if group.given]
        given += len(answers)
        sampled = sum(len(sample.tokens) for group in groups if not group.given for sample in group.samples)
        assert mismatches[step] == sampled
        of_given = sum(len(group.samples[0].tokens) for group in answers)
        assert whole[step]["teacher/given_share"] == pytest.approx(of_given / (of_given + sampled))
        for group in answers:
            whole_answer = [*tokenizer.encode(group.prompt.extra_info["answer"]), tokenizer.eos_token_id]
            assert group.samples[0].tokens.tolist() == whole_answer[:longest]
            assert group.prompt.data_source == "sums"
    assert 0 < given < 2 * small_run.STEPS

    shutil.rmtree(directory / "checkpoints" / "step_000004")
    printed = small_run.train(directory, "--step", "4", command="replay", environment=ray)
    assert "metrics are equal, bit for bit" in printed
    shutil.rmtree(directory / "hugging_face")
    assert "continuing after step 2" in small_run.train(directory / "recipe.yaml", environment=ray)
    assert small_run.stable(small_run.metrics(directory)) == small_run.stable(whole)
