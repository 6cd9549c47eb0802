"""From hidden states to the loss, without ever holding the logits of all tokens.

recipe -> model -> [head] -> loop, and evaluators (loss.py)
in    last hidden states and the unembedding
out   the mean loss with its gradient (training), or one loss a token without (evaluation), in nats
Letters: N predicted tokens, V rows of the vocabulary, D hidden size, C tokens of a chunk.

At V = 50,304 the logits of 8,192 tokens are 1.6 GB, by far the largest tensor of a small model's step, so both
functions walk over CHUNK tokens at a time. Forward and backward on one CPU thread, chunked against whole logits:
    10 ms against 13 at V = 2,048, D = 64, N = 1,016; 24 against 35 at V = 2,048, D = 96, N = 2,032;
    600 ms against 1,440 at V = 50,304, D = 64, N = 2,048.
Chunks of 128 and 512 are equal within noise at V = 2,048; below 128 the traffic of the weight's gradient takes over.
torch's own choice of a chunk ("auto") is 3 to 5 times slower than the whole logits on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import LinearCrossEntropyOptions
from torch.nn.functional import cross_entropy, linear_cross_entropy

CHUNK = 256


def mean_loss(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, chunk: int = CHUNK) -> Tensor:
    """Mean cross-entropy of the next token, in nats: a float32 scalar with its gradient.

    hidden_ND   float32 hidden states that predict; targets_N   the tokens they predict, int64
    returns     logits are computed in the autocast type if one is active, everything after them in float32;
                backward may be called once
    """
    kind = hidden_ND.device.type
    if not torch.is_autocast_enabled(kind):
        options = LinearCrossEntropyOptions(batch_chunk_size=chunk)
        return linear_cross_entropy(hidden_ND, weight_VD, targets_N, options=options)
    # torch's op returns the mean of 16-bit inputs rounded to 16 bits, three digits: too few for a stored curve
    dtype = torch.get_autocast_dtype(kind)
    apply: Callable[..., Tensor] = _ChunkedLoss.apply
    return apply(hidden_ND.to(dtype), weight_VD.to(dtype), targets_N, chunk)


@torch.no_grad()
def token_losses(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, chunk: int = CHUNK) -> Tensor:
    """Cross-entropy of each token, in nats: (N,) float32, without gradient; for evaluation."""
    losses = [
        cross_entropy((hidden_CD @ weight_VD.T).float(), targets_C, reduction="none")
        for hidden_CD, targets_C in zip(torch.split(hidden_ND, chunk), torch.split(targets_N, chunk), strict=True)
    ]
    return torch.cat(losses)


class _ChunkedLoss(torch.autograd.Function):
    """Mean cross-entropy of 16-bit inputs; forward already computes both gradients, one chunk of logits at a time."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, chunk: int) -> Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden_ND.device)
        hidden_grad_ND = torch.empty_like(hidden_ND)
        weight_grad_VD = torch.zeros_like(weight_VD, dtype=torch.float32)
        for start in range(0, len(targets_N), chunk):
            part = slice(start, start + chunk)
            hidden_CD, targets_C1 = hidden_ND[part], targets_N[part, None]
            log_p_CV = torch.log_softmax(hidden_CD @ weight_VD.T, dim=1, dtype=torch.float32)
            total -= log_p_CV.gather(1, targets_C1).sum()
            # d loss / d logits = softmax - one hot, computed in the memory of the logarithms; / N follows in backward
            grad_CV = log_p_CV.exp_()
            grad_CV.scatter_add_(1, targets_C1, grad_CV.new_full(targets_C1.shape, -1.0))
            grad_CV = grad_CV.to(hidden_ND.dtype)
            hidden_grad_ND[part] = grad_CV @ weight_VD
            weight_grad_VD += grad_CV.T @ hidden_CD
        ctx.save_for_backward(hidden_grad_ND, weight_grad_VD)
        ctx.dtype = weight_VD.dtype
        return total / len(targets_N)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden_grad_ND, weight_grad_VD = ctx.saved_tensors
        scale = upstream[0] / len(hidden_grad_ND)
        return (hidden_grad_ND * scale).to(ctx.dtype), (weight_grad_VD * scale).to(ctx.dtype), None, None
