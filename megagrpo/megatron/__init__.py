"""The training rank. Only this package imports megatron.core; importing it makes megatron.core run without CUDA."""

from megagrpo.megatron import cpu_shim

cpu_shim.enable()
