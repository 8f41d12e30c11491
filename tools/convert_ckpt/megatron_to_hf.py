"""A checkpoint into a Hugging Face model: the same as `megagrpo convert megatron-to-hf`."""

from __future__ import annotations

import sys

from megagrpo.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "megatron-to-hf", *sys.argv[1:]]))
