"""An independent trainer in plain torch: the whole transformers model, autograd, torch's AdamW on a full master.

Nothing of Conveyor's executor is used. A step is: gradients of the token-weighted loss summed over micro-batches by
autograd, clipping by torch.nn.utils.clip_grad_norm_, torch.optim.AdamW on the master (matrices with weight decay,
vectors without), weights recast from the master.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM


@dataclass
class PlainRun:
    """What a plain run leaves: losses, gradient norms and the master weights by transformers' names."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def plain_train(
    config: dict[str, Any],
    weights: dict[str, Tensor],
    batches: Sequence[tuple[Tensor, Tensor]],
    *,
    micro_batch_rows: int,
    learning_rate: float,
    betas: tuple[float, float],
    epsilon: float,
    weight_decay: float,
    max_grad_norm: float | None,
    dtype: torch.dtype,
    cast: Callable[[Tensor], Tensor] = lambda master: master,
    frozen: Collection[str] = (),
) -> PlainRun:
    """Train all parameters but the `frozen` ones on `batches` of (tokens, labels) [rows, sequence].

    Labels are shifted already, -100 does not count.
    """
    attention = "eager" if config["model_type"] == "gemma2" else "sdpa"  # only eager attention caps scores
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), dtype=dtype, attn_implementation=attention
    ).train()
    named = dict(model.named_parameters())
    assert set(named) == set(weights), set(named) ^ set(weights)
    assert set(frozen) <= set(named)
    for name in frozen:
        named[name].requires_grad_(False)
    master_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    masters = {name: torch.nn.Parameter(weights[name].to(master_dtype).clone()) for name in named}
    trained = {name: master for name, master in masters.items() if name not in frozen}
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in trained.values() if p.dim() > 1], "weight_decay": weight_decay},
            {"params": [p for p in trained.values() if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=learning_rate, betas=betas, eps=epsilon, foreach=False,
    )  # fmt: skip
    run = PlainRun()
    for tokens, labels in batches:
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(cast(masters[name]))
        num_targets = int((labels != -100).sum())
        total = 0.0
        for master in trained.values():
            master.grad = torch.zeros_like(master)
        for start in range(0, tokens.shape[0], micro_batch_rows):
            model.zero_grad(set_to_none=True)
            part = slice(start, start + micro_batch_rows)
            logits = model(tokens[part], use_cache=False).logits.to(master_dtype)
            loss = torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), labels[part].flatten(), ignore_index=-100, reduction="sum"
            )
            (loss / num_targets).backward()
            total += loss.item()
            for name, master in trained.items():
                master.grad += named[name].grad.to(master_dtype)
        if max_grad_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(trained.values(), max_grad_norm, foreach=False)
            run.norms.append(norm.item())
        optimizer.step()
        run.losses.append(total / num_targets)
    run.weights = {name: master.detach() for name, master in masters.items()}
    return run
