"""Bytes that the end of the last stage takes: from hidden states to logprobs, and the gradients back.

Logits are made a few columns at a time (megagrpo/megatron/heads.py; benchmarks/logits_memory.py measures it).
"""

from __future__ import annotations

from megagrpo.plan.memory.activations import Pass

CHUNK_ELEMENTS = 2**22
CHUNK_COLUMNS = 2048
"""As in megagrpo/megatron/heads.py."""


def chunk_bytes(rows: int, positions: int) -> int:
    """One float32 chunk of logits, where a rank holds `rows` of the output matrix."""
    columns = max(CHUNK_COLUMNS, CHUNK_ELEMENTS // max(positions, 1))
    chunks = -(-rows // columns)
    return 4 * positions * -(-rows // chunks)


def logits_bytes(work: Pass, positions: int, *, gradients: bool, entropy: bool = True) -> int:
    """The most that is held at once for the logprobs of `positions` tokens; with `gradients`, of the pass back too.

    `entropy`: as the update wants it. The output matrix has a gradient of its own size, unless it is frozen.
    """
    arch, tensor, element = work.architecture, work.layout.tensor, work.element_bytes
    rows = arch.padded_vocab(tensor) // tensor
    chunk = chunk_bytes(rows, positions)
    several = chunk < 4 * positions * rows
    narrow = element < 4
    hidden = positions * arch.hidden
    gathered = work.tokens * arch.hidden * element if tensor > 1 else 0
    chosen = hidden * element
    # Float32 chunks that live at once: where there are several, a new one is made while those of the last are there.
    # In bfloat16 the product lies beside the first of them.
    forward = 3.0 if entropy else 1.0 + several
    forward += 0.5 if narrow and (several or not entropy) else 0.0
    if not gradients:
        return int(gathered + chosen + forward * chunk)
    backward = (4.0 if entropy else 2.0) if several else (2.0 if entropy else 1.0) + 0.5 * narrow
    matrix = 0 if work.adapters else rows * arch.hidden * element
    back = backward * chunk + matrix + hidden * 4 + hidden * element
    return int(gathered + chosen + max(forward * chunk, back))


def end_bytes(work: Pass) -> int:
    """What the last norm keeps: its input is the last layer's output."""
    return 3 * work.hidden_bytes if work.device == "cpu" else 2 * work.hidden_bytes
