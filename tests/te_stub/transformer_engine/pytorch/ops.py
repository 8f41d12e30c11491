"""Layers made of operations, for use_transformer_engine_op_fuser, which the stub lacks; Megatron names two."""

import torch


class FusibleOperation(torch.nn.Module): ...


class Sequential(torch.nn.Module): ...
