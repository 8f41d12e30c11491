"""The training rank. Only this package imports megatron.core; importing it makes megatron.core run without CUDA."""

import os

# Megatron overlaps communication by launch order. CUDA reads it when torch first asks for a device.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")

from megagrpo.megatron import cpu_shim

cpu_shim.enable()
