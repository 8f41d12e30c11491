"""`megagrpo doctor`: what is installed here, fits together and works."""

from __future__ import annotations

import argparse

from megagrpo.commands.arguments import add_command

EXIT_WRONG = 1


def add_doctor(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "check packages, GPUs, network and limits of this machine; each fault comes with a remedy, and exits with 1"
    clean = "remove what killed runs of this user left in /dev/shm, instead"
    add_command(commands, "doctor", text, doctor).add_argument("--clean", action="store_true", help=clean)


def doctor(asked: argparse.Namespace) -> int:
    if asked.clean:
        from megagrpo.weights.transport.shared_memory import remove_abandoned

        removed = remove_abandoned()
        print("\n".join([*(f"removed {path}" for path in removed), f"{len(removed)} files of killed runs"]))
        return 0
    from megagrpo.doctor.doctor import examine

    return 0 if examine(print) else EXIT_WRONG
