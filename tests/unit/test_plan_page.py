"""The page of a plan: well-formed, whole, without anything from elsewhere."""

import html
import io
import re
from html.parser import HTMLParser

import pytest
from rich.console import Console

from megagrpo.plan.plan import Plan, plan_of
from megagrpo.plan.show.page import page, stage_colour
from megagrpo.plan.show.terminal import draw
from tests.plans import architecture, plan, recipe, searched


class Balance(HTMLParser):
    """A parser that checks that every element that is opened is closed, in order."""

    empty = ("meta", "br")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.open += [tag] if tag not in self.empty else []

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.empty and (not self.open or self.open.pop() != tag):
            self.wrong.append(tag)


@pytest.fixture(scope="module")
def of_70b() -> Plan:
    return plan()


def test_the_page_is_well_formed_and_needs_nothing_else(of_70b: Plan) -> None:
    text = page(of_70b, searched(of_70b.recipe, 128))
    balance = Balance()
    balance.feed(text)
    assert (balance.open, balance.wrong) == ([], [])
    assert "<script" not in text
    assert not re.search(r"(src|href)=|url\(|@import", text)
    assert "prefers-color-scheme: dark" in text


def test_every_gpu_is_a_square_that_says_what_it_holds(of_70b: Plan) -> None:
    text = page(of_70b)
    titles = re.findall(r'<i title="(.*?)"', text, re.DOTALL)
    assert len(titles) == 128
    assert titles[-1].splitlines() == [
        "node 15, GPU 7",
        "rank 127: tensor 7, context 0, data 7",
        "pipeline stage 1: 40-79, head",
        "expert 0, expert_tensor 7, expert_data 7",
        "engine 15, its tensor rank 7",
    ]
    assert text.count("•</i>") == 16  # an engine begins
    assert set(re.findall(r"background:(hsl.*?\))", text)) == {stage_colour(0, 2), stage_colour(1, 2)}


def test_it_says_what_the_terminal_says_in_colour(of_70b: Plan) -> None:
    terminal = io.StringIO()
    draw(of_70b, None, Console(file=terminal, width=120, highlight=False))
    text = page(of_70b)
    assert terminal.getvalue() in html.unescape(re.sub("<[^>]*>", "", text))
    bar = re.findall(r"^  rollout .*", text, re.MULTILINE)[0]
    assert len(set(re.findall(r"color: (#\w+)", bar))) >= 4  # parts
    of = plan(train__recompute="none", cluster__gpu="A100-40GB")
    assert "This cannot run: memory of training" in page(of)


def test_names_are_escaped_and_the_recipe_is_there(of_70b: Plan) -> None:
    assert "tokens_per_microbatch: 5120" in page(of_70b)
    of = recipe({"data.train": [{"path": "data/<b>.parquet"}]})
    text = page(plan_of(of, architecture(of), unchecked=["data/<b>.parquet: no such file on this machine"]))
    assert "<b>.parquet" not in text
    assert "data/&lt;b&gt;.parquet: no such file on this machine" in text
