"""How the bytes of a weight plan travel from training ranks to engine ranks; choice.py says where to begin."""

LOAD_FORMAT = "megagrpo.weights.transport.sglang.load"
"""The function that receives weights in a server's processes: what --custom-weight-loader and load_format call it."""
