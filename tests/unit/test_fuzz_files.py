"""Damaged files of a user, of any kind that a command reads: each command ends with an exit code, never in a traceback.

Inputs that failed once are kept in fuzz_corpus.jsonl and tried again. `make test-soak` looks for new ones, for
MEGAGRPO_FUZZ_SECONDS (60): its message has the lines to add there.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import gzip
import io
import json
import os
import random
import shlex
import shutil
import signal
import time
import traceback
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from megagrpo.checkpoint.store import MANIFEST, CheckpointStore, describe, write_manifest
from megagrpo.cli import main
from megagrpo.convert import job
from megagrpo.convert.targets import to_megatron
from megagrpo.errors import MegagrpoError
from megagrpo.recipe.load import load
from megagrpo.track.jsonl import MISMATCH_FIGURES, OWN_ROUTES, MismatchRecord, StepProof, WorstToken
from megagrpo.track.status import RunStatus
from megagrpo.trainer.saving import checkpoint_to_resume
from tests import report_runs, sample_runs
from tests.golden.record_imported import FRAMEWORKS, PEERS
from tests.safetensors_files import saved, write_peft
from tests.tiny_run import CHAT_TEMPLATE, ROW, make_run, recipe
from tests.unit.test_convert_docs import save_training

CORPUS = Path(__file__).with_name("fuzz_corpus.jsonl")
SECONDS = float(os.environ.get("MEGAGRPO_FUZZ_SECONDS", "60"))
SECONDS_MAX = 60
"""Seconds of CPU time. A command on these small files that takes more has no end."""
RUN, STEP = "runs/tiny", "runs/tiny/checkpoints/step_000003"
CONVERTS = ("convert verify model model", "convert hf-to-megatron --source model --output new")
REPORTS = (f"report {RUN} --output new", f"report {RUN} --mismatch", f"report {RUN} --rollout 3", "runs", "runs --json")
DATA = ("data check recipe.yaml 'data.train=[{path: %s}]'", "data show %s --recipe recipe.yaml")
COMMANDS: dict[str, tuple[str, ...]] = {
    "recipe.yaml": ("plan recipe.yaml", "plan recipe.yaml --json", "data check recipe.yaml", "resume"),
    "sft.yaml": ("plan sft.yaml",),
    "chats.jsonl": ("plan sft.yaml",),
    "model/": ("plan recipe.yaml", "data show train.jsonl --model model", *CONVERTS),
    "rows.": DATA,
    "folder/": tuple(command.replace("%s", "folder") for command in DATA),
    f"{STEP}/": ("resume", f"convert verify {STEP} model", f"convert megatron-to-hf --source {STEP} --output new"),
    f"{RUN}/": (*REPORTS, f"plan recipe.yaml --calibrate {RUN}", f"track sync {RUN}"),
    "megatron/": ("convert megatron-to-hf --source megatron --output new", "convert verify megatron model"),
    "adapter/": ("convert merge-lora --source model --adapter adapter --output new",),
    ".half.partial/": ("convert hf-to-megatron --source model --output half",),
    "eval/": ("report eval --output new",),
    **{name: (f"import {framework} %s",) for name, framework in FRAMEWORKS.items()},
}
"""By the start of a file's name. %s: the file. `resume` is no command, but what `train` reads when it continues."""
VALUES: tuple[Any, ...] = (None, True, 0, -1, 1, 7, 2**31, 2**63, 2**70, 10**400, 0.5, -0.5, 1e-300, 1e300, [], {})
VALUES += (float("nan"), float("inf"), "", " ", "x", "a" * 5000, "../../x", "/dev/zero", "\x1b[31m", "\x00", "\ud800")
VALUES += ([[]], [None], {"": None}, {"step": 1}, ["x"] * 300, "1", "٣", "²", "nan")
PIECES = (b"", b"\x00", b"\xff\xfe", b"{", b"]" * 9, b"[" * 5000, b": - ", b"\t", b"1e999", b"9" * 5000, b'"\\ud800"')
PIECES += (b"$((1/0))", b"`", b"'", b"${x:-", b"\n", b"*", b"=", b"~", b"\r", b"\xe2\x80\xae", b"{1..99999999}")


def make_world(patch: pytest.MonkeyPatch) -> None:
    """A file of each kind that commands read, all sound, in the current directory."""
    make_run(Path())
    model, folder = Path("model"), Path("folder")
    (model / "generation_config.json").write_text('{"eos_token_id": [3, 4], "temperature": 0.6}')
    (model / "special_tokens_map.json").write_text('{"eos_token": "#"}')
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    tensors = dict.fromkeys(saved(model), "model.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": tensors}))
    Path("rows.jsonl.gz").write_bytes(gzip.compress(f"{json.dumps(ROW)}\n".encode() * 8))
    Path("rows.json").write_text(json.dumps([ROW] * 3))
    table = pa.Table.from_pylist([ROW] * 8)
    pq.write_table(table, "rows.parquet")
    with pa.OSFile("rows.arrow", "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
        stream.write_table(table)
    folder.mkdir()
    shutil.copy("rows.arrow", folder / "data.arrow")
    (folder / "state.json").write_text('{"_data_files": [{"filename": "data.arrow"}]}')
    turns = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    Path("chats.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 8)
    fitted = {name: value for name, value in recipe(Path()).items() if name in ("model", "train", "track")}
    data = {"train": [{"path": "chats.jsonl"}], "examples_per_step": 4, "tokens_max": 32}
    Path("sft.yaml").write_text(yaml.safe_dump({"kind": "sft", "name": "sft", **fitted, "data": data}))
    sample_runs.make_samples(Path(RUN))
    tree = load("recipe.yaml").recipe.model_dump(mode="json")
    tree["track"] |= {"mlflow": None, "tensorboard": True}  # MLflow's database takes seconds to make
    report_runs.make_run(Path("made"), 6, starts=2, others=1, evaluate_every=2, recipe=tree)
    shutil.copytree("made", RUN, dirs_exist_ok=True)
    shutil.move(f"{RUN}/eval", "eval")
    worst = WorstToken("p", 0, 0, 1, "a", "b", "c", -1.0, -2.0, 1)
    own = dict.fromkeys(OWN_ROUTES, 0.5)
    proof = StepProof(2, ((0, 2),), 2, 2, 2, "fp8", same_bits=False, route_differences=(0.25, 0.5), own_routes=own)
    record = asdict(MismatchRecord(1, 2, worst=(worst,), proof=proof, **dict.fromkeys(MISMATCH_FIGURES, 0.1)))
    (Path(RUN) / "mismatch.jsonl").write_text(f"{json.dumps(record)}\n" * 3)
    RunStatus("failed", 9, 6, 1.8e9, 1.9e9, "x").write(Path(RUN))
    save_training(Path(RUN) / "checkpoints", saved(model), tree)
    to_megatron(model, Path("megatron"))
    with patch.context() as within:
        within.setattr(job, "publish", lambda *_: 1 / 0)
        with contextlib.suppress(ZeroDivisionError):
            to_megatron(model, Path("half"))
    write_peft(Path("adapter"), model, ("model.layers.0.self_attn.q_proj",))
    for name in FRAMEWORKS:
        shutil.copy(PEERS / name, name)


def resume() -> int:
    """Reads what a run continues from, as `train` does."""
    store = CheckpointStore(Path(RUN) / "checkpoints", keep_last=1)
    return 0 if checkpoint_to_resume(store, load("recipe.yaml").recipe) else 1


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything in a tree."""
    for key, value in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        yield tree, key
        if isinstance(value, dict | list):
            yield from places(value)


def with_other_value(tree: Any, draw: random.Random) -> Any:
    """One value replaced, by another of the tree too; or removed, or under another key."""
    at = list(places(tree)) if isinstance(tree, dict | list) else []
    if not at:
        return draw.choice(VALUES)
    (container, key), (other, name) = draw.choice(at), draw.choice(at)
    match draw.choice("vvvvsrk"):
        case "v":
            container[key] = copy.deepcopy(draw.choice(VALUES))
        case "s":
            container[key] = copy.deepcopy(other[name])
        case "k" if isinstance(container, dict):
            container[str(draw.choice(VALUES))] = container.pop(key)
        case _:
            del container[key]
    return tree


def with_other_bytes(data: bytes, draw: random.Random) -> bytes:
    """A piece cut out, repeated or replaced; or all that follows it gone."""
    start = draw.randint(0, len(data))
    stop = draw.randint(start, min(len(data), start + 40))
    kept = data[start:stop]
    piece = draw.choice((*PIECES, b"", kept * 3, bytes(byte ^ 1 << draw.randint(0, 7) for byte in kept)))
    return data[:start] + piece + draw.choice((data[stop:], data[stop:], data[stop:], b""))


def damaged(name: str, data: bytes, draw: random.Random) -> bytes:
    """Another value in its place, in what the name says it is; or other bytes."""

    def of_json(text: bytes | str) -> str:
        return json.dumps(with_other_value([json.loads(text)], draw))[1:-1]

    with contextlib.suppress(ValueError, RecursionError, IndexError, yaml.YAMLError):  # damaged already
        lines = data.decode(errors="replace").splitlines()
        at = draw.randrange(len(lines))
        match name.rpartition(".")[2] if draw.random() < 0.6 else "":
            case "json":
                return of_json(data).encode()
            case "jsonl":
                lines[at] = of_json(lines[at])
                return "\n".join([*lines, ""]).encode()
            case "partial/journal":  # with checksums that hold
                lines[at] = job._line(of_json(lines[at].partition(" ")[2]), at).rstrip()
                return "\n".join([*lines, ""]).encode()
            case "yaml":
                tree = with_other_value(yaml.safe_load(data), draw)
                return yaml.safe_dump(tree, allow_unicode=True).encode(errors="surrogatepass")
            case "safetensors":
                end = 8 + int.from_bytes(data[:8], "little")
                header = of_json(data[8:end]).encode()
                return len(header).to_bytes(8, "little") + header + data[end:]
    return with_other_bytes(data, draw)


@dataclass(frozen=True)
class Case:
    """A file of the world with other content (None: a directory in its place), and the command that reads it."""

    file: str
    command: str
    content: bytes | None

    @classmethod
    def of(cls, line: str) -> Case:
        file, command, content = json.loads(line)
        return cls(file, command, content and zlib.decompress(base64.b64decode(content)))

    def __str__(self) -> str:
        content = self.content if self.content is None else base64.b64encode(zlib.compress(self.content)).decode()
        return json.dumps([self.file, self.command, content])


class World:
    """All files sound, and a copy in which one is not."""

    def __init__(self, directory: Path, patch: pytest.MonkeyPatch) -> None:
        self.sound, self.copy = directory / "sound", directory / "copy"
        self.sound.mkdir()
        with contextlib.chdir(self.sound):
            make_world(patch)
        files = sorted(str(path.relative_to(self.sound)) for path in self.sound.rglob("*") if path.is_file())
        self.files = {file: commands for file in files if (commands := self._commands(file))}

    def _commands(self, file: str) -> list[str]:
        of_file = [some for start, some in COMMANDS.items() if file.startswith(start)]
        return [command.replace("%s", file) for some in of_file for command in some]

    def case(self, seed: int) -> Case:
        draw = random.Random(seed)
        file, commands = draw.choice(list(self.files.items()))
        content = (self.sound / file).read_bytes()
        for _ in range(draw.choice((1, 1, 2, 3))):
            content = damaged(file, content, draw)
        return Case(file, draw.choice(commands), None if draw.random() < 0.02 else content)

    def answer(self, case: Case) -> tuple[int | str | None, str]:
        """The exit code of the command, and what it said."""
        shutil.rmtree(self.copy, ignore_errors=True)
        shutil.copytree(self.sound, self.copy)
        path, step, said = self.copy / case.file, self.copy / STEP, io.StringIO()
        if case.content is None:
            path.unlink()
            path.mkdir()
        else:
            path.write_bytes(case.content)
        if step in path.parents and path.name != MANIFEST:  # else its checksum would tell
            write_manifest(step, [describe(step, p) for p in step.rglob("*") if p.is_file() and p.name != MANIFEST])
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS_MAX)
        try:
            with contextlib.chdir(self.copy), contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
                code = resume() if case.command == "resume" else main(shlex.split(case.command))
        except MegagrpoError:
            code = 2
        except SystemExit as ended:  # argparse's
            code = ended.code  # type: ignore[assignment]
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        assert code in (0, 1, 2, 3)
        return code, said.getvalue()


def no_end(*_: object) -> None:
    raise TimeoutError(f"no end in {SECONDS_MAX} s of CPU time")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    before = signal.signal(signal.SIGVTALRM, no_end)
    with pytest.MonkeyPatch.context() as patch:
        yield World(tmp_path_factory.mktemp("world"), patch)
    signal.signal(signal.SIGVTALRM, before)


def test_sound_files_are_read(world: World) -> None:
    told = {command: file for file, commands in world.files.items() for command in commands}
    for command, file in told.items():
        code, said = world.answer(Case(file, command, (world.sound / file).read_bytes()))
        assert code == 0, said


@pytest.mark.parametrize("line", CORPUS.read_text().splitlines(), ids=lambda line: json.loads(line)[1])
def test_files_that_failed_once_end_in_an_exit_code(world: World, line: str) -> None:
    world.answer(Case.of(line))


def test_damaged_files_end_in_an_exit_code(world: World) -> None:
    for seed in range(25):
        world.answer(world.case(seed))


@pytest.mark.soak
@pytest.mark.timeout(2 * SECONDS + 600)
def test_many_damaged_files_end_in_an_exit_code(world: World) -> None:
    failed: dict[str, Case] = {}
    seed, end = time.time_ns(), time.monotonic() + SECONDS
    while time.monotonic() < end:
        case, seed = world.case(seed), seed + 1
        try:
            world.answer(case)
        except BaseException:  # noqa: BLE001
            failed.setdefault(traceback.format_exc(limit=-3), case)
    assert not failed, "\n".join(f"{where}{case}" for where, case in failed.items())
