"""Transformer Engine 2.17.1 for tests: what Megatron-Core 0.19.2 uses of it, in plain torch on any device.

Signatures, parameter names, marks on parameters, defaults and refusals are the real package's, read from its source at
tag v2.17.1; each quirk that a caller can trip over is marked QUIRK. What runs kernels in the real package is written
here with torch's own operations, so gradients are those of the formulas. It knows nothing of Megatron or megagrpo.

Only test ranks see it: tests/rank_group.py puts this folder on their sys.path.
"""

from transformer_engine import common, pytorch

__version__ = "2.17.1"
__all__ = ["common", "pytorch"]
