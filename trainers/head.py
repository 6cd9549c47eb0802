"""From hidden states to the loss, without ever holding the logits of all tokens.

recipe -> model -> [head] -> loop, and evaluators (loss.py)
in    last hidden states and the unembedding
out   the mean loss with its gradient (training), or one loss a token without (evaluation), in nats
Letters: N predicted tokens, V rows of the vocabulary, D hidden size, C tokens of a chunk.

At V = 50,304 the logits of 8,192 tokens are 1.6 GB, by far the largest tensor of a small model's step, so both
functions walk over CHUNK tokens at a time, and training computes the gradients of a chunk while its logits are in the
cache. Forward and backward on one CPU thread in CPU milliseconds, beside torch's linear_cross_entropy with its best
chunk (256) and beside the whole logits:
    10 against 12 and 13 at V = 2,048, D = 64, N = 1,016;
    604 against 809 and 1,440 at V = 50,304, D = 64, N = 2,044;
    2,389 against 2,895 at V = 50,304, D = 384, N = 2,044.
Chunks of 128 and 256 are equal within noise; of 64 the traffic of the weight's gradient takes over, of 512 that of the
logits. torch's own choice of a chunk ("auto") is 3 to 5 times slower than the whole logits on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

CHUNK = 128
_SMALLEST = 1e-30  # below it the logarithm of a float32 probability loses digits


def mean_loss(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, chunk: int = CHUNK) -> Tensor:
    """Mean cross-entropy of the next token, in nats: a float32 scalar with its gradient.

    hidden_ND   hidden states that predict; targets_N   the tokens they predict, int64
    returns     logits are computed in the autocast type if one is active, everything after them in float32;
                backward may be called once
    """
    kind = hidden_ND.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden_ND, weight_VD = hidden_ND.to(dtype), weight_VD.to(dtype)
    apply: Callable[..., Tensor] = _ChunkedLoss.apply
    return apply(hidden_ND, weight_VD, targets_N, chunk)


@torch.no_grad()
def token_losses(hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, chunk: int = CHUNK) -> Tensor:
    """Cross-entropy of each token, in nats: (N,) float32, without gradient; for evaluation."""
    losses = [
        cross_entropy((hidden_CD @ weight_VD.T).float(), targets_C, reduction="none")
        for hidden_CD, targets_C in zip(torch.split(hidden_ND, chunk), torch.split(targets_N, chunk), strict=True)
    ]
    return torch.cat(losses)


class _ChunkedLoss(torch.autograd.Function):
    """Mean cross-entropy; forward already computes both gradients, one chunk of logits at a time."""

    @staticmethod
    def forward(ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, chunk: int) -> Tensor:
        total, lowest = (torch.full((), value, device=hidden_ND.device) for value in (0.0, 1.0))
        hidden_grad_ND = torch.empty_like(hidden_ND)
        weight_grad_VD = torch.zeros_like(weight_VD, dtype=torch.float32)
        logits_CV = hidden_ND.new_empty(min(chunk, len(hidden_ND)), len(weight_VD))
        for start in range(0, len(targets_N), chunk):
            part = slice(start, start + chunk)
            hidden_CD, targets_C1 = hidden_ND[part], targets_N[part, None]
            p_CV = _softmax(torch.mm(hidden_CD, weight_VD.T, out=logits_CV[: len(hidden_CD)]))
            p_C1 = p_CV.gather(1, targets_C1)
            total -= p_C1.log().sum()
            lowest = torch.minimum(lowest, p_C1.min())
            # d loss / d logits = softmax - one hot; / N follows in backward
            p_CV.scatter_add_(1, targets_C1, p_CV.new_full(targets_C1.shape, -1.0))
            grad_CV = p_CV.to(hidden_ND.dtype)
            torch.mm(grad_CV, weight_VD, out=hidden_grad_ND[part])
            _add_product(weight_grad_VD, grad_CV.T, hidden_CD)
        if bool(lowest < _SMALLEST):
            total = token_losses(hidden_ND, weight_VD, targets_N, chunk).sum()
        ctx.save_for_backward(hidden_grad_ND, weight_grad_VD)
        ctx.dtype = weight_VD.dtype
        return total / len(targets_N)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden_grad_ND, weight_grad_VD = ctx.saved_tensors
        scale = upstream[0] / len(hidden_grad_ND)
        return hidden_grad_ND.mul_(scale), weight_grad_VD.mul_(scale).to(ctx.dtype), None, None


def _softmax(logits_CV: Tensor) -> Tensor:
    """In float32; in the memory of the logits where they are float32 too."""
    if logits_CV.dtype == torch.float32:
        return torch.softmax(logits_CV, 1, out=logits_CV)
    return torch.softmax(logits_CV, 1, dtype=torch.float32)


def _add_product(sum_VD: Tensor, left_VC: Tensor, right_CD: Tensor) -> None:
    if left_VC.dtype == sum_VD.dtype:
        sum_VD.addmm_(left_VC, right_CD)
    else:
        sum_VD += left_VC @ right_CD
