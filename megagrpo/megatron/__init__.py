"""The training rank: all that imports megatron.core is in this package, and importing it makes megatron.core run without CUDA."""

from megagrpo.megatron import cpu_shim, guards

cpu_shim.enable()
guards.install()
