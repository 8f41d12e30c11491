"""The command line: exit codes, what is printed, and that nothing heavy is imported before it is needed."""

import errno
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from megagrpo import __version__, cli
from megagrpo.cli import EXIT_INTERRUPTED, main
from megagrpo.commands import plan as plan_command
from megagrpo.errors import EXIT_RUN_FAILED, EXIT_USER_ERROR, EngineError, Problem
from tests.tiny_run import EXPERTS, make_run

ROOT = Path(__file__).parents[2]


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


def test_help_imports_next_to_nothing() -> None:
    done = python("-X", "importtime", "-c", "from megagrpo.cli import main; main(['--help'])")
    assert done.returncode == 0
    assert all(name in done.stdout for name in ("train", "plan", "prepare"))
    imported = {line.rsplit("|", 1)[1].strip() for line in done.stderr.splitlines() if "|" in line}
    assert not imported & {"torch", "ray", "megatron", "transformers", "pydantic", "yaml", "pyarrow", "rich", "asyncio"}
    assert len(imported) < 250  # of which Python's own start has about 50


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"megagrpo {__version__}\n"


def test_train_refuses_a_bad_recipe_before_ray_or_torch_are_imported(tmp_path: Path) -> None:
    code = "import sys; from megagrpo.cli import main; code = main(sys.argv[1:])"
    code += "; assert not {'ray', 'torch', 'megatron'} & set(sys.modules); sys.exit(code)"
    done = python("-c", code, "train", str(make_run(tmp_path)), "train.layout.tensor=3")
    assert done.returncode == EXIT_USER_ERROR, done.stderr
    assert "Traceback" not in done.stderr
    assert "override train.layout.tensor=3" in done.stderr
    assert not (tmp_path / "runs").exists()


def test_plan_prints_what_the_recipe_comes_to_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_run(tmp_path, **EXPERTS)
    layout = "{tensor: 2, pipeline: 2, virtual_pipeline: 2, expert: 2, expert_tensor: 1, data: 2}"
    assert main(["plan", str(recipe), f"train.layout={layout}", "algorithm.minibatches=2"]) == 0
    summary = capsys.readouterr().out.partition("\n\n")[0]
    printed = dict(line.split(None, 1) for line in summary.splitlines())
    assert printed["ranks"].startswith("8 (tensor 2 x pipeline 2 x virtual_pipeline 2 x expert 2 x data 2)")
    assert printed["layers"] == "4, 2 on each pipeline stage in 2 chunks of 1"
    assert printed["vocabulary"] == "31, padded to 32, 16 on each tensor rank"
    assert printed["minibatches"] == "2 of 8 responses, about 4 on each of 2 data ranks"
    assert printed["length"] == "2 steps, 32 responses"
    assert not (tmp_path / "runs").exists()


def test_a_failed_run_and_an_interrupted_one_have_their_own_exit_codes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(asked: object) -> int:
        raise EngineError(Problem("engine 0", "no answer in 600 s"))

    def interrupt(asked: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(plan_command, "plan", fail)
    assert main(["plan", "recipe.yaml"]) == EXIT_RUN_FAILED
    assert "engine 0" in capsys.readouterr().err
    monkeypatch.setattr(plan_command, "plan", interrupt)
    assert main(["plan", "recipe.yaml"]) == EXIT_INTERRUPTED


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "COMMAND"),
        (["trian"], "invalid choice"),
        (["train"], "the following arguments are required: RECIPE\n"),
        (["plan", "r.yaml", "--tensor=2"], "--tensor=2"),
        (["plan", "r.yaml", "--\x1b[31m"], r"--\x1b[31m"),
        (["plan", "r.yaml", "--search", "--gpus", str(10**18)], "a whole number from 1 to 100000"),
        (["prepare"], "DATA_SET"),
        (["prepare", "jsonl"], "--source"),
        (["prepare", "jsonl", "--source", "x", "--output", "y", "--seed=-1"], "a whole number from 0"),
    ],
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == EXIT_USER_ERROR
    printed = capsys.readouterr().err
    assert "usage: megagrpo" in printed
    assert said in printed


def test_prepare_jsonl_reads_the_named_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output = tmp_path / "mine.jsonl", tmp_path / "prepared"
    source.write_text('{"q": "1+1", "a": 2}\n')
    columns = ["--prompt-column", "q", "--answer-column", "a"]
    assert main(["prepare", "jsonl", "--source", str(source), "--output", str(output), *columns]) == 0
    assert pq.read_table(output / "train.parquet").num_rows == 1
    capsys.readouterr()
    assert main(["prepare", "jsonl", "--source", str(source), "--output", str(output)]) == EXIT_USER_ERROR
    assert "no column 'prompt'" in capsys.readouterr().err


def test_a_lack_of_file_descriptors_is_one_sentence_and_code_3(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(plan_command, "doctor", lambda asked: [Path(os.devnull).open() for _ in range(10_000)])  # noqa: SIM115
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        assert cli.main(["doctor"]) == EXIT_RUN_FAILED
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "Too many open files" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error", [RuntimeError("can't start new thread"), BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))]
)
def test_a_lack_of_threads_or_processes_names_the_limit_to_raise(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Raises the errors of threading and os.fork where the user, the container or the job may start no more."""

    def refuse(asked: object) -> None:
        raise error

    monkeypatch.setattr(plan_command, "doctor", refuse)
    assert cli.main(["doctor"]) == EXIT_RUN_FAILED
    assert "ulimit -u" in capsys.readouterr().err


PATHS = "model.path model.chat_template track.directory checkpoint.directory reward.functions.0.function agent.function"


@pytest.mark.parametrize("key", PATHS.split())
def test_a_path_that_no_machine_can_have_is_the_users_error(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = f"/{'x' * 300}{'.py:f' if 'function' in key else ''}"
    assert main(["plan", str(make_run(tmp_path)), f"{key}={path}", "rollout.top_k=1"]) == EXIT_USER_ERROR
    said = capsys.readouterr().err
    assert said.count("File name too long") == 1
    assert all(part in said for part in ("(2 problems)", f"override {key}=", "override rollout.top_k", "fix:"))


def test_every_error_of_the_user_says_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where the place that found it has no fix of its own: numbers out of bounds, files of models and data."""
    recipe = make_run(tmp_path)
    asked: list[list[str]] = [["seed=-1"], [f"data.train=[{{path: {tmp_path}}}]"], ["model.chat_template=/dev/zero"]]
    for overrides in asked:
        assert main(["plan", str(recipe), *overrides]) == EXIT_USER_ERROR
        said = capsys.readouterr().err
        assert all(part in said for part in ("given: ", "needed: ", "fix: ")), said
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    rope = config | {"rope_scaling": {"rope_type": "default", "surprise": 3}}
    (tmp_path / "model" / "config.json").write_text(json.dumps(rope))
    assert main(["plan", str(recipe)]) == EXIT_USER_ERROR
    assert "rope_scaling.surprise" in capsys.readouterr().err
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    index = tmp_path / "model" / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": ["x"]}}')
    assert main(["plan", str(recipe)]) == EXIT_USER_ERROR
    assert "no weight_map" in capsys.readouterr().err
    index.unlink()
    (tmp_path / "model" / "generation_config.json").mkdir()
    assert main(["plan", str(recipe)]) == EXIT_USER_ERROR
    assert "generation_config.json" in capsys.readouterr().err


def test_an_override_with_thousands_of_unknown_keys_is_shown_in_part(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = ", ".join(f"k{number}: 1" for number in range(1000))
    assert main(["plan", str(make_run(tmp_path)), f"train.lora={{{keys}}}"]) == EXIT_USER_ERROR
    assert len(capsys.readouterr().err) < 2_000_000


def test_a_conversion_that_cannot_begin_is_the_users_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path)
    model, convert = str(tmp_path / "model"), ["convert", "hf-to-megatron", "--source"]
    file = f"{tmp_path}/train.jsonl"
    for source, output in (
        (f"{tmp_path}/nowhere", "x"),
        (model, model),
        (model, str(tmp_path)),
        (model, f"{file}/new"),
    ):
        assert main([*convert, source, "--output", output, "--overwrite"]) == EXIT_USER_ERROR
        assert "fix: " in capsys.readouterr().err
