"""Rendering through a chat template, the limit on length, mixtures of files, and the rows of their epochs."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from examples.demo.model import make_tokenizer
from megagrpo.algorithm.distillation import DistillationConfig
from megagrpo.data.files import records, row_count
from megagrpo.data.messages import load_examples
from megagrpo.data.mixture import epoch_rows, file_labels, mix, take
from megagrpo.data.prompts import load_prompts
from megagrpo.data.store import Cache, Form, Stored, store
from megagrpo.errors import DataError, ModelError
from megagrpo.recipe.schema import DataFileConfig, RewardConfig
from megagrpo.recipe.schema.data import DataConfig
from megagrpo.recipe.schema.sft import ConversationFileConfig, SftDataConfig
from megagrpo.tokenizer import load_chat_tokenizer
from tests.data_files import write_jsonl

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('tools are not for this model') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}{{ tail }}"
)


def byte_tokenizer(chat_template: str | None) -> PreTrainedTokenizerBase:
    """One token per byte: lengths are plain to see."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = chat_template
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return byte_tokenizer(TEMPLATE)


def load(*files: DataFileConfig, tokenizer, seed=0, **options):
    data = DataConfig(train=list(files), **{"prompt_tokens_max": 99} | options)
    return load_prompts(data.train, tokenizer, data, seed)


def write(path: Path, *questions: str, role: str = "user") -> DataFileConfig:
    rows = (
        {"data_source": "s", "prompt": [{"role": role, "content": q}], "reward_model": {"ground_truth": q[:1]}}
        for q in questions
    )
    return DataFileConfig(path=str(write_jsonl(path, *rows)))


def test_prompts_go_through_the_template_with_its_arguments(tokenizer, tmp_path):
    file = write(tmp_path / "a.jsonl", "hi", "h\u00e9")
    mixture = load(file, tokenizer=tokenizer, chat_template_arguments={"tail": "!"})
    texts = [tokenizer.decode(prompt.tokens) for prompt in mixture.items]
    assert texts == ["<user>hi\n<assistant>!", "<user>h\u00e9\n<assistant>!"]
    assert [prompt.id for prompt in mixture.items] == ["a.jsonl:1", "a.jsonl:2"]
    assert mixture.items[0].ground_truth == "h"
    assert mixture.items[0].messages == ({"role": "user", "content": "hi"},)
    assert [prompt.text for prompt in mixture.items] == texts


def test_given_responses_have_the_tokens_that_fine_tuning_trains_on(tmp_path):
    chat = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}\n{% endfor %}"
    tokenizer = byte_tokenizer(chat + "{% if add_generation_prompt %}[assistant]{% endif %}")
    user = {"role": "user", "content": "1+1"}
    rows = [{"prompt": [user], "data_source": "s", "ground_truth": "2", "answer": text} for text in ("two", None, "")]
    answered = [{"messages": [user, {"role": "assistant", "content": text}]} for text in ("two", "")]
    teaching = DistillationConfig.model_validate(
        {"objective": "full_vocabulary", "given_responses": {"share": 0.5, "column": "answer"}}
    )
    data = DataConfig(train=[DataFileConfig(path=str(write_jsonl(tmp_path / "a.jsonl", *rows)))], prompt_tokens_max=99)
    found = load_prompts(data.train, tokenizer, data, 0, teaching=teaching).items
    files = [ConversationFileConfig(path=str(write_jsonl(tmp_path / "b.jsonl", *answered)))]
    tuned = load_examples(files, tokenizer, SftDataConfig(train=files, examples_per_step=1, tokens_max=99), 0).items
    trained = [tuple(example.tokens[example.loss_mask].tolist()) for example in tuned]
    assert [prompt.given for prompt in found] == [trained[0], (), trained[1]]
    assert tokenizer.decode(found[0].given) == f"two{tokenizer.eos_token}"
    assert [tuple(example.tokens[~example.loss_mask].tolist())[: len(found[0].tokens)] for example in tuned] == [
        found[0].tokens
    ] * 2
    plain = load_prompts(data.train, tokenizer, data, 0).items
    assert not any(prompt.given for prompt in plain)
    write_jsonl(tmp_path / "a.jsonl", *rows, rows[0] | {"answer": 2})
    with pytest.raises(DataError, match=r"a\.jsonl line 4, answer\n.*2"):
        load_prompts(data.train, tokenizer, data, 0, teaching=teaching)


def test_a_row_of_a_source_that_no_reward_is_for_is_named(tokenizer, tmp_path):
    source = {"data_source": "t", "prompt": [{"role": "user", "content": "a"}], "reward_model": {"ground_truth": "a"}}
    path = write_jsonl(tmp_path / "a.jsonl", {**source, "data_source": "s"}, source)
    reward = RewardConfig.model_validate({"by_source": {"s*": [{"function": "gsm8k"}]}})
    data = DataConfig(train=[DataFileConfig(path=str(path))])
    with pytest.raises(DataError, match=r"a\.jsonl line 2.*"):
        load_prompts(data.train, tokenizer, data, 0, reward.source_problem)


EDGE = len("<user>1234567890\n<assistant>")


def test_overlong_prompts_are_dropped_cut_or_errors_and_always_counted(tokenizer, tmp_path):
    file = write(tmp_path / "a.jsonl", "1234567890", "12345678901", "1")
    dropped = load(file, tokenizer=tokenizer, prompt_tokens_max=EDGE, overlong_prompts="drop")
    assert [prompt.id for prompt in dropped.items] == ["a.jsonl:1", "a.jsonl:3"]
    assert (dropped.files[0].rows, dropped.files[0].overlong, dropped.files[0].taken) == (3, 1, 2)
    cut = load(file, tokenizer=tokenizer, prompt_tokens_max=EDGE, overlong_prompts="truncate_left")
    assert tokenizer.decode(cut.items[1].tokens) == "user>12345678901\n<assistant>"
    assert cut.files[0].overlong == 1
    with pytest.raises(DataError, match=rf"a.jsonl line 2: .*\n.*{EDGE + 1} tokens"):
        load(file, tokenizer=tokenizer, prompt_tokens_max=EDGE, overlong_prompts="error")
    with pytest.raises(DataError, match="all 3 rows"):
        load(file, tokenizer=tokenizer, prompt_tokens_max=3)


def test_a_row_that_the_template_refuses_is_named(tokenizer, tmp_path):
    file = write(tmp_path / "a.jsonl", "fine", role="tool")
    with pytest.raises(DataError, match=r"line 1: .*\n.*tools are not"):
        load(file, tokenizer=tokenizer)


def test_a_row_that_teachers_read_too_is_refused_once(tokenizer, tmp_path):
    files = [write(tmp_path / f"{role}.jsonl", "hi", role=role) for role in ("user", "tool")]
    data, teaching = DataConfig(train=list(files)), DistillationConfig(system="Add.")
    (prompt,) = load_prompts(files[:1], tokenizer, data, 0, teaching=teaching).items
    assert tokenizer.decode(prompt.taught) == "<system>Add.\n<user>hi\n<assistant>"
    alone = byte_tokenizer(TEMPLATE.replace("'tool'", "'system'"))
    for file, refusing in ((files[1], tokenizer), (files[0], alone)):
        with pytest.raises(DataError, match="tools are not for this model") as refused:
            load_prompts([file], refusing, data, 0, teaching=teaching)
        assert len(refused.value.problems) == 1


def test_a_tokenizer_needs_a_valid_template(tmp_path):
    byte_tokenizer(None).save_pretrained(tmp_path / "bare")
    with pytest.raises(ModelError, match=r"no chat template\n(.|\n)*set model.chat_template"):
        load_chat_tokenizer(str(tmp_path / "bare"))
    with pytest.raises(ModelError, match="cannot be read"):
        load_chat_tokenizer(str(tmp_path / "bare"), str(tmp_path / "none.jinja"))
    (tmp_path / "bad.jinja").write_text("{% for %}")
    tokenizer = load_chat_tokenizer(str(tmp_path / "bare"), str(tmp_path / "bad.jinja"))
    with pytest.raises(ModelError, match="not valid Jinja"):
        load(write(tmp_path / "a.jsonl", "hi"), tokenizer=tokenizer)
    (tmp_path / "good.jinja").write_text(TEMPLATE)
    tokenizer = load_chat_tokenizer(str(tmp_path / "bare"), str(tmp_path / "good.jinja"))
    assert len(load(write(tmp_path / "a.jsonl", "hi"), tokenizer=tokenizer).items) == 1


@pytest.mark.parametrize("named", [False, True])
def test_a_template_writes_the_same_day_in_every_run(named, tmp_path):
    template = """{% if strftime_now is defined %}{{ strftime_now ('%d %b %Y') ~ strftime_now( format="'%y", ) }}
{%- endif %} {{ messages[0].content }}"""
    byte_tokenizer({"default": template} if named else template).save_pretrained(tmp_path)
    tokenizer = load_chat_tokenizer(tmp_path)
    chat = [{"role": "user", "content": "1+1="}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "26 Jul 2024'24 1+1="


@pytest.mark.parametrize("call", ["strftime_now('%d' ~ ' %b')", "strftime_now(day)", "[strftime_now][0]('%d')"])
def test_a_template_that_computes_the_format_of_the_date_is_refused(call, tmp_path):
    byte_tokenizer("{{ " + call + " }}").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="asks for the date"):
        load_chat_tokenizer(tmp_path)


def test_a_missing_or_broken_tokenizer_is_a_model_error(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelError, match="no usable tokenizer"):
        load_chat_tokenizer(str(tmp_path / "nowhere"))
    byte_tokenizer(TEMPLATE).save_pretrained(tmp_path / "broken")
    (tmp_path / "broken" / "tokenizer.json").write_text('{"version": "1.0", "added_tokens": [], "model": 3}')
    with pytest.raises(ModelError, match="no usable tokenizer"):
        load_chat_tokenizer(str(tmp_path / "broken"))


def test_files_are_mixed_by_their_amounts(tokenizer, tmp_path):
    names = [str(i) for i in range(10)]
    files = [
        write(tmp_path / "x" / "t.jsonl", *names).model_copy(update={"amount": 3}),
        write(tmp_path / "y" / "t.jsonl", *names).model_copy(update={"amount": 0.5}),
        write(tmp_path / "z.jsonl", *names).model_copy(update={"amount": 2.0}),
    ]
    mixture = load(*files, tokenizer=tokenizer, seed=1)
    assert [file.taken for file in mixture.files] == [3, 5, 20]
    ids = [prompt.id for prompt in mixture.items]
    assert len(set(ids)) == 3 + 5 + 10
    assert {name.rpartition(":")[0] for name in ids} == {"x/t.jsonl", "y/t.jsonl", "z.jsonl"}
    assert list(mixture.items) == list(load(*files, tokenizer=tokenizer, seed=1).items)
    assert list(mixture.items) != list(load(*files, tokenizer=tokenizer, seed=2).items)


def test_problems_of_all_files_are_reported_together(tokenizer, tmp_path):
    files = [write(tmp_path / "a.jsonl", "hi", role="king"), DataFileConfig(path=str(tmp_path / "none.parquet"))]
    with pytest.raises(DataError) as raised:
        load(*files, tokenizer=tokenizer)
    assert len(raised.value.problems) == 2


@given(available=st.integers(1, 60), share=st.floats(0.02, 4.0), seed=st.integers(0, 99))
def test_a_share_takes_whole_copies_and_a_random_rest(available, share, seed):
    total = round(share * available)
    if total == 0:
        with pytest.raises(DataError, match="no row is taken"):
            take(available, share, path=Path("a"), key=(seed,))
        return
    taken = take(available, share, path=Path("a"), key=(seed,))
    times = np.bincount(taken, minlength=available)
    assert (len(taken), times.max() - times.min() <= 1) == (total, True)
    assert len(times) == available


def test_more_rows_than_there_are_is_an_error_with_a_remedy():
    for amount in (5, "all", 1.0):
        assert sorted(take(5, amount, path=Path("a"))) == [0, 1, 2, 3, 4]
    with pytest.raises(DataError, match=r"a share such as 1\.20"):
        take(5, 6, path=Path("a"))


def test_labels_are_as_short_as_unique():
    assert file_labels(["/d/a/t.parquet", "/d/b/t.parquet", "/d/v.jsonl"]) == ["a/t.parquet", "b/t.parquet", "v.jsonl"]
    assert file_labels(["/d/t.parquet", "/d/t.parquet"]) == ["t.parquet", "t.parquet"]
    assert file_labels(["/t.parquet", "/d/t.parquet"]) == ["/t.parquet", "d/t.parquet"]


@pytest.mark.parametrize("amounts", [("all", "all"), (5, "all"), (0.5, 2.5), (1.0, 3)])
def test_an_epoch_has_as_many_rows_by_count_as_mixing_takes(amounts, tmp_path):
    table, lines = tmp_path / "a.parquet", tmp_path / "b.jsonl"
    pq.write_table(pa.table({"number": list(range(23))}), table, row_group_size=5)
    lines.write_text("".join(json.dumps({"number": i}) + "\n\n" * (i % 3) for i in range(17)) + '{"number": 17}')

    def read(entry: DataFileConfig, path: str, label: str) -> Stored[None]:
        found = [{"number": number} for number, _ in records(path)]
        assert row_count(path) == len(found)
        form = Form(pa.schema([("number", pa.int64())]), lambda batch, row, name: None, lambda batch: [])
        return store(found, form, label, Cache(tmp_path), str, lambda: {"rows": len(found), "overlong": 0})

    asked = [
        DataFileConfig(path=str(path), amount=amount) for path, amount in zip((table, lines), amounts, strict=True)
    ]
    assert epoch_rows(asked) == len(mix(asked, read, seed=1).items)
    with pytest.raises(DataError, match="no such file"):
        epoch_rows([DataFileConfig(path=str(tmp_path / "none.jsonl"))])
