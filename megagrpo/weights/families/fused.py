"""Tensors of published files that hold several tensors of a layer, for the families that fuse some."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megagrpo.weights.families.architecture import Layer
from megagrpo.weights.families.parts.part import LayerTensors, Tensor, all_rows

if TYPE_CHECKING:
    from megagrpo.weights.sides.assembly import ManifestBuilder


def gate_and_up(files: ManifestBuilder, layer: Layer, of: LayerTensors) -> None:
    """Adds gate_up_proj, of MLPs: all rows of gate, then all rows of up."""
    _joined(files, "gate_up_proj", of.roles["gate"], of.roles["up"])


def everything(files: ManifestBuilder, layer: Layer, of: LayerTensors) -> None:
    """Adds gate_up_proj, and qkv_proj: all queries, all keys, all values."""
    gate_and_up(files, layer, of)
    query_key_value(files, layer, of, "qkv_proj")


def query_key_value(files: ManifestBuilder, layer: Layer, of: LayerTensors, module: str = "query_key_value") -> None:
    """Adds `module`: all queries, all keys, all values."""
    _joined(files, module, of.roles["q"], of.roles["k"], of.roles["v"])


def _joined(files: ManifestBuilder, module: str, *tensors: Tensor) -> None:
    prefix, _, suffix = tensors[0].name.rsplit(".", 2)
    files.rows(f"{prefix}.{module}.{suffix}", map(all_rows, tensors), tensors[0].shape[1:])
