"""What recomputing a node costs, for the compiler that decides what a layer keeps: its FLOPs, as torch counts them.

torch 2.11 refuses to count attention whose key and value heads are fewer than its query heads, so that is counted here.
"""

from typing import Any

import torch
from torch import fx
from torch._inductor.custom_graph_pass import CustomRuntimeEstimator, get_hash_for_files
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

import executor.capped_attention  # registers an operation that is counted here
import executor.weight_gradients

_ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention,
    torch.ops.aten._scaled_dot_product_efficient_attention,
    torch.ops.aten._scaled_dot_product_cudnn_attention,
)


def grouped_attention_flops(
    query_shape: torch.Size, key_shape: torch.Size, value_shape: torch.Size, *args: Any, **kwargs: Any
) -> int:
    """FLOPs of attention without its mask, [batch, heads, sequence, head_dim]; every query head counts."""
    batch, heads, queries, head_dim = query_shape
    return 2 * batch * heads * queries * key_shape[2] * (head_dim + value_shape[3])


def document_attention_flops(
    query_shape: torch.Size, key_shape: torch.Size, value_shape: torch.Size, *args: Any, **kwargs: Any
) -> int:
    """The same for documents of unknown lengths, [tokens, heads, head_dim]: as if the longest possible, at most."""
    tokens, heads, head_dim = query_shape
    longest = next((value for value in args if isinstance(value, int)), tokens)
    return 2 * tokens * heads * longest * (head_dim + value_shape[2])


class RecomputeCost(CustomRuntimeEstimator):
    """FLOPs of one node of a graph with static shapes, at least 1."""

    def __call__(self, node: fx.Node) -> float:
        """Run the node on the fake tensors of its inputs and count."""
        arguments, keywords = tree_map(
            lambda value: value.meta["val"] if isinstance(value, fx.Node) else value, (node.args, node.kwargs)
        )
        mapping: dict[Any, Any] = dict.fromkeys(_ATTENTION, grouped_attention_flops)
        mapping[torch.ops.conveyor.capped_attention] = grouped_attention_flops
        # Known once torch.nn.attention.varlen has been imported, which executor/attention.py does where torch has it.
        if hasattr(torch.ops.torch_attn, "_varlen_attn"):
            mapping[torch.ops.torch_attn._varlen_attn] = document_attention_flops
        with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
            assert callable(node.target)
            node.target(*arguments, **keywords)
        return float(max(counter.get_total_flops(), 1))

    def uuid(self) -> Any:
        """Compiled graphs are cached as long as what shapes them, here and in rewritten backwards, stays as it is."""
        return get_hash_for_files((__file__, executor.weight_gradients.__file__))
