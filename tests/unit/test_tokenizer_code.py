"""Tokenizers whose code a model directory has: no engine and no trainer runs it."""

import json
from pathlib import Path
from typing import Any

import pytest

from megagrpo.errors import ModelError
from megagrpo.tokenizer import load_tokenizer
from tests.rollout_engines import model_directory

NAMED = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}
NEVER = "raise SystemExit('the code of a model ran')"


OF_OLD = {"auto_map": ["tokenization_kimi.TikTokenTokenizer", None]}


@pytest.mark.parametrize(
    ("files", "config"),
    [(("tokenization_kimi.py", "tiktoken.model"), NAMED), (("tiktoken.model",), {}), ((), NAMED), ((), OF_OLD)],
)
def test_a_tokenizer_of_code_is_refused_with_its_conversion(
    files: tuple[str, ...], config: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    for file in files:
        (tmp_path / file).write_text(NEVER)
    with pytest.raises(ModelError, match=r"no tokenizer\.json(?s:.)*convert its vocabulary"):
        load_tokenizer(tmp_path)


def test_files_that_need_no_code_are_loaded_beside_it(tmp_path: Path) -> None:
    model = model_directory("qwen2", tmp_path)
    (model / "tokenization_kimi.py").write_text(NEVER)
    assert load_tokenizer(model).get_vocab()["w5"] == 5
    config = json.loads((model / "tokenizer_config.json").read_text()) | NAMED
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(model).get_vocab()["w5"] == 5
