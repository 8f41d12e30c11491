"""Compares two checkpoints: the same as `megagrpo convert verify`."""

from __future__ import annotations

import sys

from megagrpo.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "verify", *sys.argv[1:]]))
