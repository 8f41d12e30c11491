"""Guards against what Megatron and gloo compute wrongly without an error. A test shows each failure.

The others are elsewhere: config.py chooses the pipeline communication that is right for interleaved stages and
options.py refuses any other, as it refuses the fused cross-entropy, whose gradients are bfloat16; Megatron's plain
cross-entropy, which overwrites its logits, is not used (logprob.py has ours).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

_installed = False


def install() -> None:
    """Put the guards around torch.distributed.scatter and Megatron's distributed optimizer. Later calls do nothing."""
    global _installed
    if _installed:
        return
    _installed = True
    _guard_scatter()
    _guard_optimizer_resume()


def _guard_scatter() -> None:
    """gloo's scatter sends the memory behind a non-contiguous tensor as if it were contiguous: wrong data, no error."""
    original = dist.scatter

    @functools.wraps(original)
    def scatter(tensor: torch.Tensor, scatter_list: list[torch.Tensor] | None = None, *args: Any, **kwargs: Any) -> Any:
        if scatter_list is not None:
            scatter_list = [part.contiguous() for part in scatter_list]
        if tensor.is_contiguous():
            return original(tensor, scatter_list, *args, **kwargs)
        received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        work = original(received, scatter_list, *args, **kwargs)
        if work is not None:
            work.wait()
        tensor.copy_(received)
        return work

    dist.scatter = scatter


def _guard_optimizer_resume() -> None:
    """Megatron's distributed optimizer with torch's Adam (no transformer-engine, no apex): three repairs of loading.

    Our checkpoints do not go this way: state.py reads the states itself and gives each parameter its own `step`
    (state_shards.set_adam_step). The guard is for Megatron's own load_state_dict and sharded_state_dict, should
    anything call them.

    Silent: load_state_dict gives every parameter the same `step` tensor, which Adam then counts up once per parameter,
    so that the bias correction after a resume is wrong. Loud: copying a saved state fails on `step`, and a fresh
    optimizer has no states to load into.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    load_state_dict = DistributedOptimizer.load_state_dict
    sharded_state_dict = DistributedOptimizer.sharded_state_dict
    set_states = DistributedOptimizer._set_main_param_and_optimizer_states

    @functools.wraps(load_state_dict)
    def load_with_own_steps(self: Any, state_dict: Any) -> None:
        load_state_dict(self, state_dict)
        for state in self.optimizer.state.values():
            if torch.is_tensor(state.get("step")):
                state["step"] = state["step"].clone()

    def set_states_but_step(self: Any, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        if type(self.optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
            set_states(self, model_param, tensors)
            return
        group, position = self.model_param_group_index_map[model_param]
        main_param = self.optimizer.param_groups[group]["params"][position]
        with torch.no_grad():
            for name, to in {"param": main_param, **self.optimizer.state[main_param]}.items():
                if name != "step":
                    to.copy_(tensors[name])

    def sharded_state_dict_with_states(
        self: Any, model_state: Any, is_loading: bool = False, *args: Any, **kwargs: Any
    ) -> Any:
        if is_loading and type(self.optimizer) in (torch.optim.Adam, torch.optim.AdamW):
            for group in self.optimizer.param_groups:
                for param in group["params"]:
                    if not self.optimizer.state[param]:
                        self.optimizer.state[param] = {
                            "step": torch.tensor(0.0),
                            "exp_avg": torch.zeros_like(param),
                            "exp_avg_sq": torch.zeros_like(param),
                        }
        return sharded_state_dict(self, model_state, is_loading, *args, **kwargs)

    DistributedOptimizer.load_state_dict = load_with_own_steps
    DistributedOptimizer._set_main_param_and_optimizer_states = set_states_but_step
    DistributedOptimizer.sharded_state_dict = sharded_state_dict_with_states
