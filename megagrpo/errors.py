"""Every error that a user can meet. Each says where, what was given, what is needed, and how to fix it."""

from __future__ import annotations

import errno
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

EXIT_USER_ERROR = 2
EXIT_RUN_FAILED = 3
EXIT_NODE_LOST = 4
EXIT_STOPPED = 75
"""EX_TEMPFAIL of sysexits.h: nothing is wrong, and the same command continues."""


DIVERGED_FIX = (
    "lower train.optimizer.lr, or clip gradients (train.optimizer.clip_grad: 1.0), and start it again. What was saved "
    "in the steps before may be of a ruined policy: go back to one from before loss, reward and held-out scores became "
    "worse, by removing the newer directories in checkpoints"
)
"""The fix for a run whose numbers are not finite any more."""

CHARACTERS_MAX = 10_000
REPORT = "a bug of megagrpo: open an issue with the run's logs/ and recipe.yaml"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, in four short parts. `given`, `needed` and `fix` may be empty."""

    where: str
    given: str = ""
    needed: str = ""
    fix: str = ""

    def __str__(self) -> str:
        lines = [printable(self.where)]
        lines += [
            f"    {label}: {printable(text)}"
            for label, text in (("given", self.given), ("needed", self.needed), ("fix", self.fix))
            if text
        ]
        return "\n".join(lines)


class PathProblem(Problem):
    """A path that a user named and that this machine cannot have. `where` is the path."""


class MegagrpoError(Exception):
    """Base of all errors raised on purpose. Carries all problems that were found."""

    title = "error"
    exit_code = EXIT_RUN_FAILED
    advice = ""
    """The fix that is shown for problems that name what is needed, and have no fix of their own."""

    def __init__(self, problems: Problem | Iterable[Problem]) -> None:
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__(self.problems)  # with which pickle makes it again

    def __str__(self) -> str:
        count = "" if len(self.problems) == 1 else f" ({len(self.problems)} problems)"
        problems = [replace(p, fix=self.advice) if p.needed and not p.fix else p for p in self.problems]
        return "\n".join([f"{self.title}{count}:", *(f"  {str(p).replace(chr(10), chr(10) + '  ')}" for p in problems)])


def printable(text: str) -> str:
    """Escapes control characters for terminals, and shortens the text to CHARACTERS_MAX characters."""
    escaped = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text[:CHARACTERS_MAX])
    left = len(text) - CHARACTERS_MAX
    return f"{escaped}… ({left:,} characters more)" if left > 0 else escaped


def brief(value: object) -> str:
    """Formats a value for an error: one line, at most 80 characters."""
    if isinstance(value, int) and value.bit_length() > 1000:  # Python refuses to write very long ones
        return f"an integer of {value.bit_length():,} bits"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def listed(names: Sequence[object], word: str = "and") -> str:
    """Joins names: `a, b and c`."""
    *others, last = map(str, names)
    return f"{', '.join(others)} {word} {last}" if others else last


def few(names: Sequence[str], most: int = 4) -> str:
    """Joins the first names, with the number of the others: `a, b and 3 more`."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def first_line(error: BaseException) -> str:
    """Returns the first line of another library's error, or the error's name if its text is empty."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def path_problem(error: OSError) -> PathProblem | None:
    """Returns the problem of a path that this machine cannot have; None for other errors."""
    if error.errno not in (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR) or not error.filename:
        return None
    needed, fix = "a path that this machine can have", "correct it in the recipe or the command"
    return PathProblem(str(error.filename), error.strerror or str(error), needed, fix)


def pointer_problem(path: str, start: bytes) -> Problem | None:
    """Returns a problem if the file begins as a Git LFS pointer, which git-lfs has not fetched; otherwise None."""
    if not start.startswith(b"version https://git-lfs"):
        return None
    return Problem(path, "a Git LFS pointer: the file itself was not fetched", "the file", "git lfs pull, in its clone")


class RecipeError(MegagrpoError):
    """The recipe, or an override, is not valid."""

    title = "recipe error"
    exit_code = EXIT_USER_ERROR
    advice = "correct it in the recipe or the override"


class PreflightError(MegagrpoError):
    """The run cannot start. Has every problem of its recipe, model, data, rewards and directories."""

    title = "cannot start"
    exit_code = EXIT_USER_ERROR
    advice = "correct that file or directory, or name another one in the recipe"


class DataError(MegagrpoError):
    """A prompt file is missing, unreadable, or has a bad row."""

    title = "data error"
    exit_code = EXIT_USER_ERROR
    advice = "correct that file, or make it again"


class ModelError(MegagrpoError):
    """A model directory, its config, its tokenizer or its tensors are not usable."""

    title = "model error"
    exit_code = EXIT_USER_ERROR
    advice = "correct that file, download the model again, or take one that docs/families.md lists"


class RewardError(MegagrpoError):
    """A reward function cannot be loaded or has the wrong signature.

    A reward that fails on a sample is counted, not raised.
    """

    title = "reward error"
    exit_code = EXIT_USER_ERROR
    advice = "correct the function's file, or name another function"


class TeacherError(MegagrpoError):
    """A teacher that runs already does not answer as it must, or teachers failed on too many responses.

    A teacher that fails on a sample is counted, not raised.
    """

    title = "teacher error"


class AgentError(MegagrpoError):
    """The agent of the recipe cannot be loaded, or its processes do not start.

    An agent that fails in a rollout is counted, not raised.
    """

    title = "agent error"
    exit_code = EXIT_USER_ERROR
    advice = "correct the agent's file, or the recipe's agent section"


class WeightPlanError(MegagrpoError):
    """A transfer plan does not cover its destination exactly, or its sources disagree."""

    title = "weight plan error"


class WeightSyncError(MegagrpoError):
    """Weights did not arrive: a digest differs, an acknowledgement is missing, or a deadline passed."""

    title = "weight sync error"


class EngineError(MegagrpoError):
    """A rollout engine failed or did not answer in time."""

    title = "engine error"


class MismatchError(MegagrpoError):
    """Training ranks and engines disagree about sampled tokens by more than the recipe allows."""

    title = "train-versus-rollout mismatch"


class AlertError(MegagrpoError):
    """A rule of docs/health.md fired at which the recipe ends the run (rollout.alerts)."""

    title = "the run looks ill"


class ReportError(MegagrpoError):
    """A run's directory has no report files, or unreadable ones."""

    title = "nothing to report"
    exit_code = EXIT_USER_ERROR
    advice = "name the directory of a run, such as runs/NAME"


class TrackError(MegagrpoError):
    """A tracker could not receive the missing part of a run."""

    title = "tracking error"


class CheckpointError(MegagrpoError):
    """A checkpoint cannot be written or read. Nothing already saved is touched."""

    title = "checkpoint error"
    advice = "make room if the disk is full, restore the files, or name another checkpoint"


class UnusableCheckpointError(CheckpointError):
    """A checkpoint that is there, or the place that a user names for one, cannot be used."""

    exit_code = EXIT_USER_ERROR
    advice = "name another directory"


class RankError(MegagrpoError):
    """A training rank failed, died, or did not answer in time."""

    title = "training rank error"


class RankLostError(RankError):
    """A training rank died, hung or failed by no fault of the recipe: the same work may succeed with new ranks."""


class NodeLostError(MegagrpoError):
    """A node of the cluster died. The same command continues on other nodes."""

    title = "node lost"
    exit_code = EXIT_NODE_LOST


class MachineError(MegagrpoError):
    """The machine has no room, memory or file descriptors left, or files of the run were taken away."""

    title = "machine error"


class RunStopped(MegagrpoError):  # noqa: N818  not a failure, because it was asked for
    """The run was told to stop, and has saved all finished steps."""

    title = "stopped"
    exit_code = EXIT_STOPPED
