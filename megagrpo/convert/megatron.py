"""Writes a checkpoint that Megatron-LM loads in any layout (--load DIR --finetune, format torch_dist), layer by layer.

latest_checkpointed_iteration.txt
iter_0000000/       tensors (.metadata, *.distcp), arguments (common.pt), the name of the format (metadata.json)
hugging_face/       config and tokenizer, with which megagrpo reads it again
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from megagrpo.checkpoint.torch_checkpoint import TorchFile, Written, write_metadata
from megagrpo.convert import torch_dist
from megagrpo.convert.job import Advance, Converted, Target, by_layer, convert
from megagrpo.convert.source import COMPANION_MODEL, TRACKER, Source, open_source
from megagrpo.convert.torch_dist import Chunk
from megagrpo.weights.boxes import ITEM_BYTES, Box
from megagrpo.weights.families.architecture import Architecture, Experts
from megagrpo.weights.files.export import lay_out
from megagrpo.weights.views import box_view, torch_dtype

ITERATION = "iter_0000000"
CHUNK_BYTES = 256 * 1024**2
"""Larger parameters are stored in several chunks."""
PIECE_BYTES = 8 * 1024**2
"""Bytes that are read at once."""


def to_megatron(
    path: Path, output: Path, *, model: Path | None = None, dtype: str | None = None, overwrite: bool = False
) -> Converted:
    """Writes a torch_dist checkpoint for Megatron-LM from the checkpoint at `path`. Arguments as in to_hugging_face."""
    return convert(open_source(path, model), output, MegatronTarget, dtype, "megatron", overwrite=overwrite)


class MegatronTarget(Target):
    """One .distcp file for each layer, and one for each parameter outside of layers."""

    def __init__(self, source: Source, dtype: str | None) -> None:
        super().__init__(source, dtype)
        self._manifest = torch_dist.manifest(source.architecture, self._dtypes)
        self._units = by_layer(torch_dist.chunks(self._manifest), lambda chunk: chunk.key)
        self.unit_bytes = [
            sum(math.prod(chunk.shape) * self._item_bytes(chunk) for chunk in unit) for unit in self._units
        ]

    def begin(self, directory: Path) -> None:
        (directory / ITERATION).mkdir()
        (directory / COMPANION_MODEL).mkdir()
        lay_out(directory / COMPANION_MODEL, (), self._source.model_directory, self._source.main_dtype(self._dtypes))

    def write(self, index: int, directory: Path, advance: Advance) -> Any:
        written = []
        with TorchFile(directory / ITERATION / f"__{index}_0.distcp") as file:
            for chunk in self._units[index]:
                for part in _parts(chunk, self._item_bytes(chunk)):
                    values = self._assemble(part)
                    written.append(asdict(file.add(part.key, part.start, values)))
                    advance(values.nbytes)
                self._source.forget()
        return written

    def finish(self, directory: Path, written: Sequence[Any]) -> None:
        path = directory / ITERATION
        entries = [Written(**values) for of_unit in written for values in of_unit]
        with TorchFile(path / f"__{len(self._units)}_0.distcp") as file:
            entries += [file.add_object(key, None) for key in torch_dist.extra_states(self._manifest)]
        write_metadata(path, self._manifest.storages, entries)
        common = {
            "args": Namespace(**_arguments(self._source.architecture)),
            "checkpoint_version": 3.0,
            "iteration": 0,
            "content_metadata": {"singleton_local_shards": False, "chained_optim_avoid_prefix": True},
        }
        with (path / "common.pt").open("wb") as stream:
            torch.save(common, stream)
        (directory / TRACKER).write_text("0", encoding="utf-8")

    def _assemble(self, part: Chunk) -> torch.Tensor:
        """Returns the values of a part: from the source, cast, and fused as Megatron fuses them."""
        dtype = torch_dtype(self._manifest.storages[part.key].dtype)
        values = torch.empty(part.shape, dtype=dtype)
        for placement in part.placements:
            at = tuple(a - s for a, s in zip(placement.at, part.start, strict=True))
            local = replace(placement, at=at)
            for box in placement.box.pieces(PIECE_BYTES // dtype.itemsize):
                box_view(values, local.part(box)).copy_(self._source.read_as(box, dtype))
        return values

    def _item_bytes(self, chunk: Chunk) -> int:
        return ITEM_BYTES[self._manifest.storages[chunk.key].dtype]


def _parts(chunk: Chunk, item_bytes: int) -> Iterator[Chunk]:
    """Yields the chunk as runs of rows of at most CHUNK_BYTES."""
    for box in Box(chunk.key, chunk.start, chunk.shape).pieces(CHUNK_BYTES // item_bytes):
        held = (placement.within(box) for placement in chunk.placements)
        placements = tuple(part for part in held if part is not None)
        yield replace(chunk, start=box.start, shape=box.shape, placements=placements)


# For every model, by the names of Megatron-LM's parser.
FIXED = {
    "normalization": "RMSNorm",
    "apply_layernorm_1p": False,
    "apply_query_key_layer_scaling": False,
    "swiglu": True,
    "squared_relu": False,
    "add_bias_linear": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "world_size": 1,
    "data_parallel_size": 1,
    "ckpt_format": "torch_dist",
    "no_save_optim": True,
    "no_save_rng": True,
    "position_embedding_type": "rope",
    "use_rotary_position_embeddings": True,
    "rotary_percent": 1.0,
    "rotary_interleaved": False,
}


def _arguments(arch: Architecture) -> dict[str, Any]:
    """Returns Megatron-LM's arguments that describe the model, for --use-checkpoint-args, by its parser's names.

    The number of rows of the embedding is left out: Megatron-LM pads it to its own layout and loads either size.
    """
    rope, yarn, latent = arch.rope, arch.rope.yarn, arch.latent
    arguments: dict[str, Any] = FIXED | {
        "num_layers": arch.layers,
        "hidden_size": arch.hidden,
        "ffn_hidden_size": arch.ffn,
        "num_attention_heads": arch.heads,
        "group_query_attention": arch.query_groups != arch.heads,
        "num_query_groups": arch.query_groups,
        "kv_channels": arch.head_dim,
        "max_position_embeddings": arch.max_positions,
        "norm_epsilon": arch.norm_epsilon,
        "add_qkv_bias": arch.qkv_bias,
        "qk_layernorm": arch.qk_norm or latent is not None,
        "untie_embeddings_and_output_weights": not arch.tied_embeddings,
        "rotary_base": int(rope.theta),
        "use_rope_scaling": rope.factor is not None,
        **({} if rope.factor is None else {"rope_scaling_factor": rope.factor}),
    }
    if yarn is not None:
        arguments |= {
            "rope_type": "yarn",
            "rotary_scaling_factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_max_positions,
            **{name: getattr(yarn, name) for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")},
        }
    if latent is not None:
        arguments |= {
            "multi_latent_attention": True,
            "q_lora_rank": latent.query_rank,
            "kv_lora_rank": latent.key_value_rank,
            "qk_head_dim": latent.plain_dim,
            "qk_pos_emb_head_dim": latent.rotary_dim,
            "v_head_dim": latent.value_dim,
        }
    return arguments if arch.experts is None else arguments | _of_experts(arch.experts, arch.layers)


def _of_experts(experts: Experts, layers: int) -> dict[str, Any]:
    dense = experts.dense_layers
    arguments: dict[str, Any] = {
        "num_experts": experts.count,
        "moe_ffn_hidden_size": experts.ffn,
        "moe_router_topk": experts.per_token,
        "moe_router_pre_softmax": not experts.normalize_top_k,
        # With a list Megatron expects keys of its own for each layer, which the checkpoint has if layers differ.
        "moe_layer_freq": [0] * dense + [1] * (layers - dense) if dense else 1,
    }
    if experts.shared_ffn:
        arguments["moe_shared_expert_intermediate_size"] = experts.shared_ffn
    if (router := experts.router) is not None:
        arguments |= {
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_topk_scaling_factor": router.scale,
            "moe_router_num_groups": router.groups,
            "moe_router_group_topk": router.groups_per_token,
        }
    return arguments
