"""Transports, which move the bytes of a weight plan from training ranks to engine ranks. Begin with choice.py."""

LOAD_FORMAT = "megagrpo.weights.transport.sglang.load"
"""The function that receives weights in a server's processes: the value of --custom-weight-loader and load_format."""
WORKER_EXTENSION = "megagrpo.weights.transport.vllm.WeightsExtension"
"""The class that receives weights in vLLM's workers: the value of --worker-extension-cls."""
