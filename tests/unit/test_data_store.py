"""Rows outside of memory: the same items wherever they are kept, found again by a later run, whole or not there."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from examples.demo.model import make_tokenizer
from megagrpo.algorithm.distillation import DistillationConfig
from megagrpo.data.cursor import Cursor
from megagrpo.data.messages import load_examples
from megagrpo.data.mixture import Mixture, fingerprint
from megagrpo.data.prompts import load_prompts
from megagrpo.errors import DataError
from megagrpo.recipe.schema import DataFileConfig
from megagrpo.recipe.schema.data import DataConfig
from megagrpo.recipe.schema.sft import ConversationFileConfig, SftDataConfig
from megagrpo.types import Prompt
from tests.data_files import write_jsonl

TOKENIZER = make_tokenizer()
ROWS = [
    {
        "data_source": "s",
        "prompt": [{"role": "user", "content": f"{i}" * (1 + i % 5)}],
        "reward_model": {"ground_truth": f"{i}"},
        "extra_info": {"i": i},
    }
    for i in range(40)
]


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Everything is kept in files, in small batches; gives their folder."""
    monkeypatch.setattr("megagrpo.data.store.IN_MEMORY_BYTES", 0)
    monkeypatch.setattr("megagrpo.data.store.BATCH_ROWS", 7)
    monkeypatch.setattr("megagrpo.data.prompts.BATCH_ROWS", 7)
    monkeypatch.setattr("megagrpo.data.prompts.CACHED_BYTES", 0)
    return tmp_path / "cache"


def load(tmp_path: Path, teaching: DistillationConfig | None = None, **given: Any) -> Mixture[Prompt]:
    entry = DataFileConfig(path=str(tmp_path / "a.jsonl"), amount=given.pop("amount", "all"))
    data = DataConfig(train=[entry], cache=str(tmp_path / "cache"), **{"prompt_tokens_max": 200} | given)
    return load_prompts(data.train, TOKENIZER, data, 3, teaching=teaching)


@pytest.mark.parametrize("amount", ["all", 2.5, 11])
def test_prompts_on_the_disk_are_those_in_memory_with_the_same_fingerprint(amount, tmp_path, request):
    write_jsonl(tmp_path / "a.jsonl", *ROWS)
    in_memory = load(tmp_path, amount=amount)
    assert not (tmp_path / "cache").exists()
    request.getfixturevalue("on_disk")
    for _ in range(2):  # written, then found
        kept = load(tmp_path, amount=amount)
        assert list(kept.items) == list(in_memory.items)
        assert kept.files == in_memory.files
        assert fingerprint(kept.items) == fingerprint(in_memory.items) == fingerprint(list(kept.items))
        drawn = [prompt.id for prompt in Cursor(kept.items, seed=1).next(100)]
        assert drawn == [prompt.id for prompt in Cursor(list(in_memory.items), seed=1).next(100)]
    assert kept.items[3:5] == [kept.items[3], kept.items[4]]
    assert kept.items[-1] == kept.items[len(kept.items) - 1]
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == [".arrow", ".json"]


def test_examples_of_fine_tuning_are_kept_as_well(tmp_path, request):
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "yes"}]
    write_jsonl(tmp_path / "a.jsonl", *[{"messages": chat}] * 30)
    entry = ConversationFileConfig(path=str(tmp_path / "a.jsonl"))
    data = SftDataConfig(train=[entry], examples_per_step=1, cache=str(tmp_path / "cache"))
    first = load_examples(data.train, TOKENIZER, data, 0)
    request.getfixturevalue("on_disk")
    second = load_examples(data.train, TOKENIZER, data, 0)
    assert fingerprint(first.items) == fingerprint(second.items)
    assert [example.content() for example in second.items] == [example.content() for example in first.items]
    assert second.items[8].loss_mask.any()


def test_what_a_row_becomes_follows_from_its_file_and_every_setting(on_disk, tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", *ROWS)
    load(tmp_path)

    def kept() -> int:
        return len(list(on_disk.glob("*.arrow")))

    for count, given in enumerate(
        ({"prompt_tokens_max": 150}, {"system_prompt": "Add."}, {"overlong_prompts": "error"}), 2
    ):
        load(tmp_path, **given)
        assert kept() == count
    write_jsonl(path, *ROWS, ROWS[0])
    assert len(load(tmp_path).items) == 41
    assert kept() == 5


def test_a_damaged_or_half_written_file_is_made_again(on_disk, tmp_path):
    write_jsonl(tmp_path / "a.jsonl", *ROWS)
    whole = list(load(tmp_path).items)
    (arrow,) = on_disk.glob("*.arrow")

    def cut_off() -> None:
        content = arrow.read_bytes()
        arrow.unlink()  # what is mapped stays
        arrow.write_bytes(content[:100])

    for damage in (cut_off, arrow.with_suffix(".json").unlink):
        damage()
        assert list(load(tmp_path).items) == whole
    assert json.loads(arrow.with_suffix(".json").read_text()) == {"rows": 40, "overlong": 0}


def test_a_bad_row_leaves_nothing_behind(on_disk, tmp_path):
    write_jsonl(tmp_path / "a.jsonl", *ROWS, {**ROWS[0], "prompt": []})
    with pytest.raises(DataError, match="line 41"):
        load(tmp_path)
    assert list(on_disk.iterdir()) == []


def test_prompts_in_the_cache_are_those_that_teachers_may_read(on_disk, tmp_path):
    write_jsonl(tmp_path / "a.jsonl", *ROWS)
    taught = [load(tmp_path, DistillationConfig(system=system)).items[0].taught for system in ("Add.", "Count.")]
    assert len(set(taught)) == 2
    with pytest.raises(DataError, match="system_tokens_max"):
        load(tmp_path, DistillationConfig(system="Add.", system_tokens_max=3))


def test_a_folder_that_cannot_be_written_is_named(on_disk, tmp_path):
    write_jsonl(tmp_path / "a.jsonl", *ROWS)
    on_disk.write_text("a file")
    with pytest.raises(DataError, match=r"data.cache"):
        load(tmp_path)


def test_a_file_that_is_removed_while_it_is_used_is_still_read(on_disk, tmp_path):
    write_jsonl(tmp_path / "a.jsonl", *ROWS)
    mixture = load(tmp_path)
    for path in on_disk.iterdir():
        os.unlink(path)
    assert [prompt.extra_info["i"] for prompt in mixture.items] == list(range(40))


def test_several_processes_may_keep_the_same_rows_at_once(on_disk, tmp_path):
    write_jsonl(tmp_path / "a.jsonl", *ROWS)
    with ThreadPoolExecutor(4) as pool:
        kept = [future.result() for future in [pool.submit(load, tmp_path) for _ in range(8)]]
    assert all(list(mixture.items) == list(kept[0].items) for mixture in kept)
    assert sorted(path.suffix for path in on_disk.iterdir()) == [".arrow", ".json"]
