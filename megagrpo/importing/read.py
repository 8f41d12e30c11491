"""A recipe from a file of another framework: read, translated, written and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megagrpo.errors import Problem
from megagrpo.importing import open_instruct, slime, trl, verl
from megagrpo.importing.options import Given, command_line, flags, hydra_overrides, value_of, yaml_options
from megagrpo.importing.recipe_text import recipe_problems, recipe_text
from megagrpo.importing.translate import Framework, Translation, translate

SCRIPT_SUFFIXES = (".sh", ".bash", ".sbatch", ".slurm")
FRAMEWORKS: dict[str, Framework] = {
    "verl": Framework(
        "verl", "verl", r"(.*/)?main_(ppo|dapo)\.py|.*\.main_(ppo|dapo)", "python3 -m verl.trainer.main_ppo ...",
        hydra_overrides, verl, {"": yaml_options},
    ),
    "open_instruct": Framework(
        "open_instruct", "open-instruct", r"(.*/)?grpo(_fast)?\.py|.*\.grpo(_fast)?",
        "python open_instruct/grpo_fast.py ...", flags, open_instruct, negates=True,
    ),
    "slime": Framework("slime", "slime", r"(.*/)?train(_async)?\.py", "python3 train.py ...", flags, slime),
    "trl": Framework(
        "trl", "TRL", r"grpo|(.*/)?grpo(_trainer)?\.py", "trl grpo ...", flags, trl,
        {".py": trl.python_options, "": yaml_options},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Imported:
    """A recipe made from another framework's file. problems: of the recipe by itself."""

    translation: Translation
    text: str
    problems: Sequence[Problem]


def import_recipe(framework: str, path: Path, set_to: Mapping[str, str], environment: Mapping[str, str]) -> Imported:
    """Translates a file. set_to: values of a script's variables, or of options by their names. Raises RecipeError if
    the file cannot be read, or has nothing of that framework."""
    peer, notes, given = FRAMEWORKS[framework], list[str](), dict[str, Given]()
    suffix = path.suffix if path.suffix in peer.files else ""
    if path.suffix not in SCRIPT_SUFFIXES and suffix in peer.files:
        given = peer.files[suffix](path)
    else:
        words, notes = command_line(path, peer.program, set_to, environment, peer.command)
        for name, option in peer.words(words).items():
            switch = name.removeprefix("no_")
            off = peer.negates and name not in peer.table and switch in peer.table
            given |= {switch: Given(switch, False, option.line)} if off else {name: option}
    given |= {name: Given(name, value_of(value), 0) for name, value in set_to.items() if peer.row(name)}
    translation = translate(peer, path, given, notes)
    problems = recipe_problems(translation)
    return Imported(translation, recipe_text(translation, problems), problems)
