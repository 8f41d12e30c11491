"""A conversion that is killed, meets a full disk or a second one leaves nothing half done under the output's name."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from megagrpo import cli
from megagrpo.convert import job
from megagrpo.convert.job import Converted
from megagrpo.convert.targets import to_hugging_face, to_megatron
from megagrpo.convert.verify import verify
from megagrpo.errors import CheckpointError
from megagrpo.progress import Work
from megagrpo.weights.families import read_architecture
from megagrpo.weights.sides import checkpoint
from tests.safetensors_files import assert_same_files
from tests.small_disk import small_disk
from tests.tiny_models import make_model

CONVERSIONS: dict[str, Callable[[Path, Path], Converted]] = {
    "hf-to-megatron": to_megatron,
    "megatron-to-hf": to_hugging_face,
}

MEMORY = """
import resource, sys
from pathlib import Path
from megagrpo.convert.targets import to_hugging_face
from megagrpo.convert.targets import to_megatron
from megagrpo.convert.verify import verify

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

model, small, out = map(Path, sys.argv[1:])
to_hugging_face(to_megatron(small, out / "warm").directory, out / "up")
verify(small, out / "up")
before = peak()
to_hugging_face(to_megatron(model, out / "megatron").directory, out / "back")
assert not verify(model, out / "back").differences
print(peak() - before)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model("qwen3_moe", tmp_path_factory.mktemp("models") / "model")


def in_child(work: Callable[[], object]) -> int:
    """Runs `work` in a copy of this process; returns its exit code, or minus a signal."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        except BaseException:  # noqa: BLE001  whatever it is, the test must see it
            traceback.print_exc()
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def killed_after(bytes_left: int, work: Callable[[], object]) -> None:
    """Does the work, and kills this process in the middle of it."""

    class Deadly(Work):
        def advance(self, count: float = 1) -> None:
            super().advance(count)
            if self.done > bytes_left:
                os.kill(os.getpid(), signal.SIGKILL)

    @contextlib.contextmanager
    def progress(*_: object) -> Iterator[Work]:
        yield Deadly("converting")

    job.progress = progress
    work()


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_killed_conversion_continues_where_it_was(
    name: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, total = tmp_path / "out", CONVERSIONS[name](model, tmp_path / "whole").bytes
    assert in_child(lambda: killed_after(total // 2, lambda: CONVERSIONS[name](model, output))) == -signal.SIGKILL
    assert not output.exists()
    journal = tmp_path / ".out.partial" / "journal"
    done = len(journal.read_text().splitlines()) - 1
    assert done >= 2
    with journal.open("a") as file:
        file.write('[{"key": "dec')  # it died while writing this line
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / ".out.partial" / "output").rglob("__[01]_0.distcp")}
    assert cli.main(["convert", name, "--source", str(model), "--output", str(output)]) == 0
    assert f"continued: {done} parts" in capsys.readouterr().err
    assert all((output / path.parent.name / path.name).stat().st_mtime_ns == at for path, at in before.items())
    assert not verify(model, output).differences
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "whole"]
    if name == "megatron-to-hf":
        assert_same_files(model, output)


@pytest.mark.parametrize(
    "garbage",
    [b"[1]\n", b'{"a": 1}\n', b"\xff\xfe\n", b"[" * 100_000 + b"\n"],
    ids=["list", "object", "bytes", "nested"],
)
def test_a_conversion_whose_journal_is_damaged_begins_again(garbage: bytes, model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert in_child(lambda: killed_after(300_000, lambda: to_hugging_face(model, output))) == -signal.SIGKILL
    journal = tmp_path / ".out.partial" / "journal"
    journal.write_bytes(journal.read_bytes().splitlines(keepends=True)[0] + garbage)
    assert to_hugging_face(model, output).continued == 0
    assert not verify(model, output).differences


@pytest.mark.parametrize("dtype", ["bfloat16", None], ids=["options", "source"])
def test_a_conversion_of_something_else_is_not_continued(dtype: str | None, model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert in_child(lambda: killed_after(300_000, lambda: to_hugging_face(model, output))) == -signal.SIGKILL
    source = model if dtype else make_model("qwen3_moe", tmp_path / "other", seed=1)
    assert to_hugging_face(source, output, dtype=dtype).continued == 0
    assert not verify(source, output, dtype=dtype).differences


def test_a_full_disk_is_named_and_the_conversion_can_be_continued(model: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    with small_disk(100_000):  # the file of the embedding is smaller than this, that of a layer larger
        with pytest.raises(CheckpointError, match=r"File too large(.|\n)*the same command resumes"):
            to_megatron(model, output)
        with pytest.raises(CheckpointError, match="File too large"):
            to_hugging_face(model, tmp_path / "model")  # one file, which is laid out at its full size
    assert not output.exists()
    assert to_megatron(model, output).continued == 1
    assert not verify(model, output).differences


@pytest.mark.parametrize("name", CONVERSIONS)
def test_what_exists_is_untouched_until_the_new_one_is_complete(
    name: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "out"
    CONVERSIONS[name](model, output)
    (output / "precious").write_text("everything")
    with pytest.raises(CheckpointError, match="it exists"):
        CONVERSIONS[name](model, output)
    real, calls = os.fsync, 0

    def fsync(descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CheckpointError, match="No space left"):
        CONVERSIONS[name](model, output, overwrite=True)
    assert (output / "precious").read_text() == "everything"
    done = CONVERSIONS[name](model, output, overwrite=True)
    assert done.continued > 0
    assert not (output / "precious").exists()
    assert not verify(model, output).differences
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", CONVERSIONS)
def test_only_an_earlier_conversion_is_replaced(name: str, model: Path, tmp_path: Path) -> None:
    source = tmp_path / "above" / "model"
    shutil.copytree(model, source)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(source)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for output in ("above", "above/model", "above/../above/model", "foreign", "file", "link"):
        with pytest.raises(CheckpointError):
            CONVERSIONS[name](source, tmp_path / output, overwrite=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_value_too_large_for_the_dtype_ends_a_conversion(name: str, model: Path, tmp_path: Path) -> None:
    source = tmp_path / "large"
    shutil.copytree(model, source)
    (file,) = source.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.norm.weight"][3] = 1e5  # float16 ends at 65,504
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        CONVERSIONS[name](source, tmp_path / "out", dtype="float16")
    assert list(tmp_path.iterdir()) == [source]
    assert CONVERSIONS[name](source, tmp_path / "out", dtype="bfloat16").tensors


def test_only_one_process_makes_an_output(model: Path, tmp_path: Path) -> None:
    (tmp_path / ".out.partial").mkdir()
    with (tmp_path / ".out.partial" / "journal").open("w") as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="another process"):
            to_megatron(model, tmp_path / "out")
    assert to_megatron(model, tmp_path / "out").continued == 0


@pytest.mark.long
def test_memory_stays_near_one_layer(model: Path, tmp_path: Path) -> None:
    large, total = large_model(tmp_path / "large")
    command = [sys.executable, "-c", MEMORY, *map(str, (large, model, tmp_path))]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    layer = (4 * 1024 * 1024 + 3 * 1024 * 4096) * 2
    assert total > 400_000_000
    assert int(run.stdout) < 3.5 * layer < total / 3, f"{int(run.stdout) / layer:.1f} layers"


def large_model(directory: Path) -> tuple[Path, int]:
    """A qwen2 of 10 layers with random bytes, in bfloat16, and how many there are of them."""
    directory.mkdir()
    config = {
        "model_type": "qwen2", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 10,
        "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 16000, "max_position_embeddings": 512,
        "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "dtype": "bfloat16",
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    (file,) = checkpoint.new_files(read_architecture(directory), "bfloat16")
    header, entries = checkpoint.header_of(file)
    random = np.random.default_rng(0)
    with (directory / file.holder).open("wb") as stream:
        stream.write(header)
        for entry in entries.values():
            stream.write(random.bytes(entry.end - entry.begin))
    return directory, sum(entry.end - entry.begin for entry in entries.values())
