"""The search tools of examples/agents/ over real corpora: by bm25s, and by an encoder of transformers."""

import asyncio
import json
import logging
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.agents.tools.load import provider
from megagrpo.agents.tools.tool import answer
from megagrpo.errors import RecipeError
from megagrpo.recipe.schema.agent import ToolConfig
from megagrpo.user_functions import load_function

EXAMPLES = Path(__file__).parents[2] / "examples" / "agents"
ROWS = [
    {"id": "fr", "title": "France", "text": "Paris is the capital of France, on the river Seine."},
    {"id": "de", "title": "Germany", "text": "Berlin is the capital of Germany; the Spree flows through it."},
    {"id": "cat", "title": "", "text": "A cat is an animal that purrs. Ünïcödé 猫."},
    {"id": "empty", "title": "", "text": ""},
]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n", encoding="utf-8")
    return file


def example(name: str) -> Any:
    return load_function(f"{EXAMPLES}/{name}", "agent.tools.0", RecipeError)


def search(corpus: Path, *queries: str, file: str = "bm25_search.py", **arguments: Any) -> list[str]:
    async def run() -> list[str]:
        config = ToolConfig(name=f"{EXAMPLES}/{file}:Search", arguments={"corpus": str(corpus), **arguments})
        made = provider(config, "agent.tools.0")
        sys.modules[example(f"{file}:Search").__module__]._opened.cache_clear()  # as in a process that has just begun
        async with made.session(None) as session:
            tools = {tool.name: tool for tool in session.tools}
            results = await asyncio.gather(*(answer(tools["search"], {"query": query}) for query in queries))
        return [result.text for result in results]

    return asyncio.run(run())


def test_passages_with_the_words_of_a_query_come_first(corpus: Path) -> None:
    pytest.importorskip("bm25s")
    seine, capital, animal, none, blank = search(corpus, "Seine?", "capital GERMANY", "purrs", "xyzzy", " ", results=2)
    assert seine == f"[1] France\n{ROWS[0]['text']}"
    assert capital.startswith("[1] Germany\n")
    assert "[2] France" in capital
    assert animal == f"[1] {ROWS[2]['text']}"
    assert none == "Nothing was found."
    assert blank.startswith("Error")


def test_a_corpus_of_parquet_with_columns_of_its_own_is_searched(tmp_path: Path) -> None:
    pytest.importorskip("bm25s")
    file = tmp_path / "corpus.parquet"
    pq.write_table(pa.Table.from_pylist([{"body_text": row["text"], "heading": row["title"]} for row in ROWS]), file)
    (found,) = search(file, "Spree", text="body_text", title="heading")
    assert found == f"[1] Germany\n{ROWS[1]['text']}"
    with pytest.raises(ValueError, match="row 1 has no text in text or contents"):
        search(file, "Spree")


def test_an_index_is_made_once_and_again_when_its_corpus_changes(
    corpus: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("bm25s")
    index = tmp_path / "elsewhere" / "index"
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            search(corpus, "Seine", index=str(index))
    assert sum("was made" in record.getMessage() for record in caplog.records) == 1
    made = (index / "made_from.json").stat().st_mtime_ns
    with corpus.open("a") as file:
        file.write(json.dumps({"contents": "The Amazon is a river.", "id": 5}) + "\n")
    (found,) = search(corpus, "Amazon", index=str(index))
    assert found == "[1] The Amazon is a river."
    assert (index / "made_from.json").stat().st_mtime_ns != made


def test_a_directory_that_is_no_index_is_left_as_it_is(corpus: Path, tmp_path: Path) -> None:
    pytest.importorskip("bm25s")
    with pytest.raises(ValueError, match="no index"):
        search(corpus, "Seine", index=str(tmp_path))
    assert corpus.exists()


def _index(corpus: str, directory: str) -> None:
    def build(made: Path, passages: Any) -> None:
        (made / "builds").write_text("1")
        with open(f"{directory}.log", "a") as log:
            log.write("built\n")

    example("corpus.py:indexed")(Path(directory), example("corpus.py:Corpus")(Path(corpus)), {}, build)


def test_of_processes_that_start_together_one_makes_the_index(corpus: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_index, args=(str(corpus), str(tmp_path / "index"))) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert (tmp_path / "index.log").read_text() == "built\n"
    assert [dict(passage) for passage in example("corpus.py:Passages")(tmp_path / "index")] == ROWS


@pytest.mark.parametrize("line", ["[1, 2]", '{"title": "no text"}', '{"text": 5}', "{", '"text"', "\x00"])
def test_rows_that_are_no_passages_are_told_with_their_file(tmp_path: Path, line: str) -> None:
    file = tmp_path / "corpus.jsonl"
    file.write_text(json.dumps(ROWS[0]) + "\n" + line + "\n")
    with pytest.raises(ValueError, match=r"corpus\.jsonl"):
        search(file, "Seine")
    assert list(tmp_path.glob("*.index")) == []


def test_a_corpus_without_words_finds_nothing(tmp_path: Path) -> None:
    pytest.importorskip("bm25s")
    file = tmp_path / "corpus.jsonl"
    file.write_text('{"text": ""}\n')
    assert search(file, "Seine") == ["Nothing was found."]
    file.write_text("")
    assert search(file, "Seine") == ["Nothing was found."]


@given(st.lists(st.integers(0, 5), max_size=30), st.integers(1, 40))
def test_the_best_are_those_of_a_stable_sort(scores: list[int], results: int) -> None:
    expected = sorted(range(len(scores)), key=lambda number: -scores[number])[:results]
    assert example("dense_search.py:best")(np.array(scores, np.float32), results) == expected


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small encoder with random weights: what is equal has equal vectors, and nothing else."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("encoder")
    words = sorted({word for row in ROWS for word in f"{row['title']} {row['text']}".split()})
    vocabulary = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(directory)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=len(vocabulary), **sizes)).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_the_nearest_passages_come_first(corpus: Path, encoder: Path, pooling: str) -> None:
    queries = [f"{row['title']}\n{row['text']}".lstrip() for row in ROWS[:3]]
    found = search(corpus, *queries, file="dense_search.py", encoder=str(encoder), pooling=pooling, results=1)
    assert found == [f"[1] {query}" for query in queries]


def test_vectors_of_texts_in_a_batch_are_those_of_each_alone(encoder: Path) -> None:
    encoding = example("dense_search.py:Encoding")
    texts = ["Paris is the capital", "A cat", "Berlin is the capital of Germany; the Spree flows"]
    for pooling in ("mean", "cls", "last"):
        made = example("dense_search.py:Encoder")(encoding(str(encoder), pooling, 16, "cpu", ""))
        together = made.vectors(texts)
        alone = np.concatenate([made.vectors([text]) for text in texts])
        np.testing.assert_allclose(together, alone, atol=1e-5)
        np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-5)


def test_a_directory_without_an_encoder_is_told(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=str(tmp_path)):
        search(corpus, "Seine", file="dense_search.py", encoder=str(tmp_path))
