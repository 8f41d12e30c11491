"""A checkpoint into Megatron-LM's torch_dist: the same as `megagrpo convert hf-to-megatron`."""

from __future__ import annotations

import sys

from megagrpo.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", "hf-to-megatron", *sys.argv[1:]]))
