"""A low-rank adapter added to its model's weights: the same as `megagrpo convert merge-lora`."""

from __future__ import annotations

import sys

from megagrpo.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "merge-lora", *sys.argv[1:]]))
