"""Broken recipes, overrides, models and data: `megagrpo plan` answers 0 or 2, never with a traceback.

MEGAGRPO_FUZZ_EXAMPLES=2000 with --hypothesis-profile=new_examples looks further.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megagrpo.cli import main
from megagrpo.recipe.load import dump, load_any
from megagrpo.recipe.yaml12 import to_text
from tests.tiny_run import CONFIG, EXPERTS, ROW, make_run

EXAMPLES = int(os.environ.get("MEGAGRPO_FUZZ_EXAMPLES", "40"))
fuzz = settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))

NUMBERS = st.sampled_from(
    [0, 1, -1, 2, 3, 7, 255, 10**6, 2**31, 2**63, 2**70, 10**18, -(2**70), 10**400, 0.5, -0.5, 1e-300, 1e300]
)
TEXTS = st.sampled_from(
    ["", " ", "x", "a" * 5000, "../../x", "/", ".", "/dev/zero", "/dev/null", "\x1b[31m", "\x00", "nan", "1", "a.py:f"]
)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    NUMBERS,
    TEXTS,
    st.sampled_from([float("nan"), float("inf"), [], {}, [[]], [None], {"": None}, {"name": "x"}, ["x"] * 300]),
).map(copy.deepcopy)


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything in a tree."""
    for key, value in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        yield tree, key
        if isinstance(value, dict | list):
            yield from places(value)


@st.composite
def mutated(draw: st.DrawFn, tree: Any) -> Any:
    """The tree with one to three of its values replaced, removed or added."""
    changed = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, 3))):
        if not (at := list(places(changed))):
            return changed
        container, key = at[draw(st.integers(0, len(at) - 1))]
        match draw(st.sampled_from(["replace", "replace", "replace", "remove", "add"])):
            case "replace":
                container[key] = draw(VALUES)
            case "remove":
                del container[key]
            case "add" if isinstance(container, dict):
                container[draw(TEXTS)] = draw(VALUES)
            case _:
                container.append(draw(VALUES)) if isinstance(container, list) else None
    return changed


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """The bytes with a piece cut out, repeated, or replaced."""
    start = draw(st.integers(0, len(data)))
    stop = draw(st.integers(start, min(len(data), start + 40)))
    pieces = [b"", data[start:stop] * 3, b"\x00", b"\xff\xfe", b"{", b"]" * 9, b": - ", b"\t", b"1e999"]
    piece = draw(st.sampled_from(pieces))
    return data[:start] + piece + data[stop:]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def whole(run: Path) -> dict[str, Any]:
    """The recipe with every field."""
    tree: dict[str, Any] = yaml.safe_load(dump(load_any(run).recipe))
    return tree


def copied(run: Path) -> Path:
    """The recipe of a run in another directory, in place of the last such copy."""
    directory = run.parent.with_name("copy")
    shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(run.parent, directory)
    recipe = directory / "recipe.yaml"
    recipe.write_text(run.read_text().replace(str(run.parent), str(directory)))
    return recipe


def answers(recipe: Path, *arguments: str) -> None:
    try:
        code = main(["plan", str(recipe), *arguments])
    except SystemExit as ended:
        code = ended.code  # type: ignore[assignment]  # argparse's
    assert code in (0, 2)


@fuzz
@given(data=st.data())
def test_recipes(run: Path, whole: dict[str, Any], data: st.DataObject) -> None:
    recipe = run.with_name("mutated.yaml")
    recipe.write_text(to_text(data.draw(mutated(whole))), encoding="utf-8", errors="surrogatepass")
    answers(recipe)


@fuzz
@given(data=st.data())
def test_texts_of_recipes(run: Path, data: st.DataObject) -> None:
    recipe = run.with_name("damaged.yaml")
    recipe.write_bytes(data.draw(damaged(run.read_bytes())))
    answers(recipe)


@fuzz
@given(data=st.data())
def test_overrides(run: Path, whole: dict[str, Any], data: st.DataObject) -> None:
    def paths(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
        for key, value in tree.items():
            yield f"{prefix}{key}"
            if isinstance(value, dict):
                yield from paths(value, f"{prefix}{key}.")

    path = data.draw(st.sampled_from(list(paths(whole))))
    value = data.draw(st.one_of(VALUES.map(json.dumps), TEXTS, st.text(max_size=5)))
    answers(run, f"{path}={value}")


@fuzz
@given(data=st.data(), base=st.sampled_from([CONFIG, CONFIG | EXPERTS]))
def test_configs_of_models(run: Path, data: st.DataObject, base: dict[str, Any]) -> None:
    recipe = copied(run)
    (recipe.parent / "model" / "config.json").write_text(json.dumps(data.draw(mutated(base))))
    answers(recipe)


@fuzz
@given(data=st.data(), name=st.sampled_from(["config.json", "tokenizer_config.json", "tokenizer.json", "train.jsonl"]))
def test_files_of_models_and_data(run: Path, data: st.DataObject, name: str) -> None:
    recipe = copied(run)
    (path,) = recipe.parent.rglob(name)
    path.write_bytes(data.draw(damaged(path.read_bytes())))
    answers(recipe)


@fuzz
@given(data=st.data())
def test_headers_of_weights(run: Path, data: st.DataObject) -> None:
    recipe = copied(run)
    path = recipe.parent / "model" / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.dumps(data.draw(mutated(json.loads(content[8 : 8 + length])))).encode()
    size = data.draw(st.sampled_from([len(header)] * 4 + [0, 2**40, 2**63]))
    path.write_bytes(size.to_bytes(8, "little") + header + content[8 + length :])
    answers(recipe)


@fuzz
@given(data=st.data())
def test_rows(run: Path, data: st.DataObject) -> None:
    recipe = copied(run)
    rows = [data.draw(mutated(ROW)) for _ in range(3)]
    (recipe.parent / "train.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    answers(recipe)
