"""Bytes that a plan says a token takes in an engine's cache, against SGLang's own pools of keys and values."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from megagrpo.plan.engine import cache_bytes_per_token
from megagrpo.plan.parameters import known_models
from megagrpo.weights.families import read_architecture

TOKENS = 64
POOLS = """
import json, sys
from megagrpo.rollout.sglang.launch import fill_gaps_on_cpus
fill_gaps_on_cpus()
import numpy as np, torch
from sglang.srt.mem_cache import memory_pool
found = []
for name, sizes in json.loads(sys.argv[1]):
    kind = getattr(memory_pool, name)
    pool = kind(dtype=torch.bfloat16, page_size=1, device="cpu", enable_memory_saver=False, **sizes)
    found.append(int(np.sum(pool.get_kv_size_bytes())))
print(json.dumps(found))
"""


@pytest.mark.long
def test_cached_bytes_are_those_of_sglangs_pools() -> None:
    dense, latent = (
        read_architecture(known_models()[name]) for name in ("Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3")
    )
    assert latent.latent is not None
    of_heads = {"size": TOKENS, "layer_num": dense.layers, "head_num": 2, "head_dim": dense.head_dim}
    of_latents = {
        "size": TOKENS,
        "layer_num": latent.layers,
        "kv_lora_rank": latent.latent.key_value_rank,
        "qk_rope_head_dim": latent.latent.rotary_dim,
    }
    asked = json.dumps([["MHATokenToKVPool", of_heads], ["MLATokenToKVPool", of_latents]])
    # In a process of its own: what SGLang needs on a CPU changes modules that other tests import.
    command = [sys.executable, "-c", POOLS, asked]
    answered = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    held = json.loads(answered.stdout.splitlines()[-1])
    each = cache_bytes_per_token(dense, 2, 2), cache_bytes_per_token(latent, 8, 2)
    assert held == [(TOKENS + 1) * size for size in each]  # with a slot for padding
