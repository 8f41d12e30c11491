"""Malformed recipes, models and data, each through the command line: exit code 2, a clear message, no traceback."""

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from megagrpo.cli import main
from megagrpo.errors import EXIT_USER_ERROR, PreflightError
from megagrpo.preflight.preflight import preflight
from megagrpo.recipe.load import load
from tests.tiny_run import ROW, make_run


@dataclass(frozen=True)
class Case:
    """A way to spoil a good run (its directory is given), overrides, and words that the message must have."""

    name: str
    words: tuple[str, ...]
    overrides: tuple[str, ...] = ()
    spoil: Callable[[Path], Any] = lambda directory: None
    config: dict[str, Any] | None = None


def edit(old: str, new: str) -> Callable[[Path], Any]:
    """Replace text in the recipe."""

    def spoil(directory: Path) -> None:
        path = directory / "recipe.yaml"
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))

    return spoil


def write(name: str, content: str | bytes) -> Callable[[Path], Any]:
    data = content.encode() if isinstance(content, str) else content
    return lambda directory: (directory / name).write_bytes(data)


def remove(name: str) -> Callable[[Path], Any]:
    return lambda directory: (directory / name).unlink()


def without(section: str, key: str | None = None) -> Callable[[Path], Any]:
    """Leave a section, or one key of it, out of the recipe."""

    def spoil(directory: Path) -> None:
        path = directory / "recipe.yaml"
        tree = yaml.safe_load(path.read_text())
        if key is None:
            del tree[section]
        else:
            del tree[section][key]
        path.write_text(yaml.safe_dump(tree, sort_keys=False))

    return spoil


def truncated_parquet(directory: Path) -> None:
    pq.write_table(pa.Table.from_pylist([ROW] * 50), directory / "whole.parquet")
    (directory / "cut.parquet").write_bytes((directory / "whole.parquet").read_bytes()[:-40])


def truncated_weights(directory: Path) -> None:
    path = directory / "model" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def a_wider_model(directory: Path) -> None:
    path = directory / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"intermediate_size": 32}))


KEEP_BEST = ("eval.files=[{path: '{tmp}/train.jsonl'}]", "checkpoint.keep_best=products/mean@1")
CASES = [
    # the file
    Case("empty file", ("recipe.yaml", "given: nothing"), spoil=write("recipe.yaml", "")),
    Case("only comments", ("given: nothing",), spoil=write("recipe.yaml", "# nothing\n")),
    Case(
        "not UTF-8", ("recipe.yaml:2", "0xe9", "save it as UTF-8"), spoil=write("recipe.yaml", b"name: a\nseed: \xe9\n")
    ),
    Case("binary", ("recipe.yaml:1", "printable text"), spoil=write("recipe.yaml", b"name: \x00\x01")),
    Case(
        "missing file", ("no such file", "other.yaml"), spoil=lambda at: (at / "recipe.yaml").rename(at / "other.yaml")
    ),
    Case(
        "a list",
        ("given: a list", "a mapping with the keys kind, name, seed"),
        spoil=write("recipe.yaml", "- name: a\n"),
    ),
    Case("a word", ("given: a single value",), spoil=write("recipe.yaml", "recipe")),
    Case("tabs", ("recipe.yaml:2", "spaces, not tabs"), spoil=write("recipe.yaml", "model:\n\tpath: x\n")),
    Case("open bracket", ("valid YAML",), spoil=edit("name: tiny", "name: [tiny")),
    Case("two documents", ("valid YAML", "single document"), spoil=edit("name: tiny", "name: tiny\n---")),
    Case(
        "key twice", ("recipe.yaml:2 name", "first is on line 1"), spoil=edit("name: tiny", "name: tiny\nname: other")
    ),
    Case("python tag", ("plain YAML", "remove the tag"), spoil=edit("name: tiny", "name: !!python/name:os.system ''")),
    Case("contains itself", ("contains itself",), spoil=edit("model:", "train: &a {layout: *a}\nmodel:")),
    Case("a deep nest", ("nested too deeply",), spoil=write("recipe.yaml", "[" * 600)),
    # keys and values
    Case("unknown section", ("rollouts", "did you mean `rollout`?"), spoil=edit("rollout:", "rollouts:")),
    Case("unknown key", ("train.layout.tensr", "did you mean `tensor`?"), spoil=edit("tensor: 1", "tensr: 1")),
    Case(
        "text for a number", ("total_steps", "'many' (text)", "an integer of at least 1"), ("train.total_steps=many",)
    ),
    Case("quoted number", ("'3' (text)", "write 3, without quotes"), ("seed='3'",)),
    Case("fraction of a rank", ("an integer of at least 1", "given: 1.5"), ("train.layout.tensor=1.5",)),
    Case("negative rate", ("train.optimizer.lr", "a number above 0"), ("train.optimizer.lr=-1e-6",)),
    Case("infinite rate", ("a finite number",), ("train.optimizer.lr=.inf",)),
    Case("yes for true", ("data.shuffle", "write true"), ("data.shuffle=yes",)),
    Case("unknown choice", ("did you mean `seq_mean_token_mean`?",), ("algorithm.aggregation=seq-mean-token-mean",)),
    Case("no files", ("data.train", "at least one item"), ("data.train=[]",)),
    Case("bad amount", ("data.train.0.amount", "or all"), ("data.train.0.amount=half",)),
    Case("null section", ("train.layout", "its keys, or remove it"), ("train.layout=",)),
    Case("missing section", ("given: nothing", "add `reward:`"), spoil=without("reward")),
    Case("missing key", ("prompts_per_step", "add `prompts_per_step:`"), spoil=without("rollout", "prompts_per_step")),
    Case("name is a path", ("letters, digits",), ("name=../tiny",)),
    # overrides
    Case("override without value", ("override train.total_steps", "SECTION.KEY=VALUE"), ("train.total_steps",)),
    Case("override of a missing item", ("item 1", "an item from 0 to 0"), ("data.train.1.path=x",)),
    Case("override below a number", ("seed is an integer", "set seed itself"), ("seed.value=1",)),
    # impossible combinations
    Case("no length", ("exactly one of total_steps",), ("train.total_steps=null",)),
    Case("unknown megatron field", ("hidden_dropout",), ("train.megatron.hiden_dropout=0",)),
    Case(
        "options that Megatron refuses together",
        ("Megatron refuses", "layers less than 4"),
        ("train.megatron={cpu_offloading: true, cpu_offloading_num_layers: 99}",),
    ),
    # the model
    Case("missing model", ("model.path", "did you mean", "model?"), spoil=edit("/model\n", "/modle\n")),
    Case("missing config", ("config.json",), spoil=remove("model/config.json")),
    Case("broken config", ("config.json",), spoil=write("model/config.json", "{")),
    Case("unknown family", ("gpt2", "llama, mixtral"), spoil=write("model/config.json", '{"model_type": "gpt2"}')),
    Case("missing weights", ("model.safetensors",), spoil=remove("model/model.safetensors")),
    Case("truncated weights", ("cut short",), spoil=truncated_weights),
    Case(
        "weights of another size",
        ("mlp.gate_proj.weight", "[24, 16]", "[32, 16]", "more problems"),
        spoil=a_wider_model,
    ),
    Case("missing tokenizer", ("no tokenizer",), spoil=remove("model/tokenizer.json")),
    Case("broken tokenizer", ("tokenizer.json",), spoil=write("model/tokenizer.json", "{}")),
    Case("larger tokenizer", ("ids below 20",), config={"vocab_size": 20}),
    Case("no chat template", ("without a chat template",), spoil=write("model/tokenizer_config.json", "{}")),
    Case("broken template", ("line 1", "Jinja"), ("model.chat_template={tmp}/t.jinja",), write("t.jinja", "{% for %}")),
    # data and rewards
    Case("missing data", ("data.train.0.path", "no such file"), ("data.train.0.path={tmp}/none.jsonl",)),
    Case("empty data", ("the file is empty",), spoil=write("train.jsonl", "")),
    Case(
        "missing column",
        ("no column 'data_source'",),
        spoil=write("train.jsonl", '{"question": "1+1", "answer": "2"}\n'),
    ),
    Case("data not UTF-8", ("line 1: not UTF-8",), spoil=write("train.jsonl", b'{"prompt": "\xe9"}\n')),
    Case(
        "truncated parquet", ("cannot be read as parquet",), ("data.train.0.path={tmp}/cut.parquet",), truncated_parquet
    ),
    Case("no such source", ("data source products", "one of sums"), KEEP_BEST),
    Case("unknown reward", ("did you mean gsm8k?",), ("reward.functions.0.function=gsm8",)),
    Case("missing reward file", ("mine.py",), ("reward.functions.0.function={tmp}/mine.py:score",)),
    # the machine
    Case("missing package", ("megagrpo[wandb]",), ("track.wandb={}",)),
    Case("run directory is a file", ("is a file",), ("track.directory={tmp}/train.jsonl",)),
]


@pytest.mark.parametrize("case", CASES, ids=[case.name.replace(" ", "_") for case in CASES])
def test_a_malformed_run_ends_with_a_clear_error_and_exit_code_2(
    case: Case, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "track.wandb={}" in case.overrides and importlib.util.find_spec("wandb"):
        pytest.skip("wandb is installed")
    recipe = make_run(tmp_path, **(case.config or {}))
    case.spoil(tmp_path)
    code = main(["plan", str(recipe), *(text.replace("{tmp}", str(tmp_path)) for text in case.overrides)])
    printed = capsys.readouterr()
    assert code == EXIT_USER_ERROR
    assert "Traceback" not in printed.err
    assert printed.err.startswith(("recipe error", "cannot start"))
    assert [word for word in case.words if word not in printed.err] == []
    assert printed.out == ""


def test_problems_of_recipe_model_and_data_come_in_one_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = make_run(tmp_path)
    (tmp_path / "train.jsonl").write_text("")
    (tmp_path / "model" / "tokenizer.json").unlink()
    assert (
        main(["plan", str(recipe), "rollout.top_k=3", "train.layout.pipeline=3", "reward.functions.0.function=gsm8"])
        == 2
    )
    printed = capsys.readouterr().err
    assert printed.startswith("cannot start (5 problems):")
    for words in ("rollout.top_k", "4 layers", "no tokenizer", "train.jsonl", "did you mean gsm8k?"):
        assert words in printed


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        (0, ("cluster.device", "no CUDA devices", "2 for train.layout", "cluster.device: cpu")),
        (1, ("1 CUDA device\n", "a smaller train.layout")),
        (2, ()),
    ],
)
def test_a_run_on_this_machine_needs_its_gpus(
    devices: int,
    words: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: devices)  # whatever machine the test runs on
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    recipe, overrides = make_run(tmp_path), ["cluster.device=cuda", "train.layout.tensor=2"]
    if words:
        with pytest.raises(PreflightError) as raised:
            preflight(load(recipe, overrides))
        assert [word for word in words if word not in str(raised.value)] == []
    else:
        preflight(load(recipe, overrides))
    assert main(["plan", str(recipe), *overrides]) == 0
    preflight(load(recipe, [*overrides, "cluster.address=auto"]))
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    preflight(load(recipe, overrides))


def test_a_hub_model_is_taken_from_the_cache_offline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_run(tmp_path)
    cached = tmp_path / "cache" / "models--somebody--tiny"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0" * 40)
    (cached / "snapshots").mkdir()
    (tmp_path / "model").rename(cached / "snapshots" / ("0" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    ready = preflight(load(recipe, ["model.path=somebody/tiny"]))
    assert ready.model_directory == ready.tokenizer_directory == cached / "snapshots" / ("0" * 40)
    assert main(["plan", str(recipe), "model.path=somebody/tiny", "model.revision=other"]) == 2
    assert "somebody/tiny at other" in capsys.readouterr().err


def test_a_missing_hub_model_is_reported_offline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(tmp_path)
    recipe = make_run(tmp_path)
    assert main(["plan", str(recipe), "model.path=nobody/nothing"]) == 2
    printed = capsys.readouterr().err
    assert "nobody/nothing: no such directory" in printed
    assert "HF_HUB_OFFLINE" in printed
