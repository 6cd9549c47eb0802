"""The two families' networks, in plain torch: what transformers' Llama and GPT-NeoX classes compute, bit for bit.

recipe -> [blocks] -> model -> loop
in    Model (config.py)
out   a network whose parameters have the names and shapes of transformers' classes, so that any checkpoint loads there
not   fresh weights (model.py), the loss (head.py), generation, caches, attention masks: text is packed, never padded

Why not those classes themselves: importing them costs 4.5 CPU seconds in every process that trains, three times what
torch takes, and their forward pass builds masks and rotary tables anew at every step. tests/test_blocks.py compares the
states and the gradients of both, bit for bit, so a change of either is seen.

Letters: B sequences, T tokens, D hidden size, M size of the MLP, H heads, K = D / H dimensions of a head, R of them
rotated.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention, silu

from trainers.config import Model


class States(NamedTuple):
    """What a body returns; the name is transformers' own."""

    last_hidden_state: Tensor


class CausalLM(nn.Module):
    """A body and a head. The few names that it shares with transformers' PreTrainedModel mean the same here."""

    lm_head: nn.Linear

    def __init__(self, body_name: str, body: _Body, model: Model) -> None:
        super().__init__()
        self.base_model_prefix = body_name
        self.add_module(body_name, body)
        self.lm_head = _linear(model.hidden_size, model.vocab_rows, bias=False)
        if model.tied:
            self.lm_head.weight = body.input_embedding.weight

    @property
    def base_model(self) -> _Body:
        """From ids (B, T) to states (B, T, D), without the head."""
        body: _Body = getattr(self, self.base_model_prefix)
        return body

    def get_output_embeddings(self) -> nn.Linear:
        """The head; its weight is W, (V, D)."""
        return self.lm_head

    @property
    def device(self) -> torch.device:
        return self.lm_head.weight.device


class Olmo(CausalLM):
    """OLMo's model ladder: transformers' LlamaForCausalLM."""

    def __init__(self, model: Model) -> None:
        super().__init__("model", _OlmoBody(model), model)


class Pythia(CausalLM):
    """Pythia: transformers' GPTNeoXForCausalLM."""

    def __init__(self, model: Model) -> None:
        super().__init__("gpt_neox", _PythiaBody(model), model)


class _Body(nn.Module):
    """Embedding, blocks, final norm. Rotary tables are computed once, for the longest sequence."""

    layers: nn.ModuleList

    def __init__(self, model: Model) -> None:
        super().__init__()
        cos_TR, sin_TR = rotary_tables(model)
        self.cosines = nn.Buffer(cos_TR, persistent=False)
        self.sines = nn.Buffer(sin_TR, persistent=False)

    @property
    def input_embedding(self) -> nn.Embedding:
        raise NotImplementedError

    @property
    def final_norm(self) -> nn.Module:
        raise NotImplementedError

    def forward(self, input_ids: Tensor) -> States:
        """input_ids: (B, T) int64, T at most the model's context. returns States of (B, T, D)."""
        length = input_ids.shape[1]
        rotation = (self.cosines[:length], self.sines[:length])
        x_BTD = self.input_embedding(input_ids)
        for layer in self.layers:
            x_BTD = layer(x_BTD, rotation)
        return States(last_hidden_state=self.final_norm(x_BTD))


# ---- rotary positions ------------------------------------------------------------------------------------------------


def rotary_tables(model: Model) -> tuple[Tensor, Tensor]:
    """Cosines and sines of every position, (T, R) each; the sines of the first half are negated, as `rotate` needs.

    source   Su et al. 2021, in the layout of GPT-NeoX: dimension i turns with dimension i + R / 2
    """
    rotated = int(model.hidden_size // model.heads * model.rotary_fraction)
    frequencies = 1.0 / model.rotary_theta ** (torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)
    angles = torch.arange(model.context, dtype=torch.float32)[:, None] * frequencies
    sines = angles.sin()
    return torch.cat((angles.cos(), angles.cos()), dim=1), torch.cat((-sines, sines), dim=1)


def rotate(x_BHTK: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the first R dimensions of each head by its position; the others pass."""
    cos_TR, sin_TR = rotation
    rotated = cos_TR.shape[1]
    if rotated < x_BHTK.shape[-1]:
        return torch.cat((rotate(x_BHTK[..., :rotated], rotation), x_BHTK[..., rotated:]), dim=-1)
    first, second = x_BHTK.chunk(2, dim=-1)
    return x_BHTK * cos_TR + torch.cat((second, first), dim=-1) * sin_TR


# ---- olmo ------------------------------------------------------------------------------------------------------------


class _OlmoBody(_Body):
    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.embed_tokens = _embedding(model)
        self.layers = nn.ModuleList(_OlmoBlock(model) for _ in range(model.layers))
        self.norm = _rms_norm(model)

    @property
    def input_embedding(self) -> nn.Embedding:
        return self.embed_tokens

    @property
    def final_norm(self) -> nn.Module:
        return self.norm


class _OlmoBlock(nn.Module):
    """RMS norm before attention and before a SwiGLU MLP, no biases."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.self_attn = _OlmoAttention(model)
        self.mlp = _OlmoMLP(model)
        self.input_layernorm = _rms_norm(model)
        self.post_attention_layernorm = _rms_norm(model)

    def forward(self, x_BTD: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), rotation)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class _OlmoAttention(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        size, self.heads = model.hidden_size, model.heads
        self.q_proj = _linear(size, size, bias=False)
        self.k_proj = _linear(size, size, bias=False)
        self.v_proj = _linear(size, size, bias=False)
        self.o_proj = _linear(size, size, bias=False)

    def forward(self, x_BTD: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (_split_heads(project(x_BTD), self.heads) for project in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(_attend(rotate(q, rotation), rotate(k, rotation), v))


class _OlmoMLP(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.gate_proj = _linear(model.hidden_size, model.mlp_size, bias=False)
        self.up_proj = _linear(model.hidden_size, model.mlp_size, bias=False)
        self.down_proj = _linear(model.mlp_size, model.hidden_size, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


# ---- pythia ----------------------------------------------------------------------------------------------------------


class _PythiaBody(_Body):
    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.embed_in = _embedding(model)
        self.layers = nn.ModuleList(_PythiaBlock(model) for _ in range(model.layers))
        self.final_layer_norm = _layer_norm(model)

    @property
    def input_embedding(self) -> nn.Embedding:
        return self.embed_in

    @property
    def final_norm(self) -> nn.Module:
        return self.final_layer_norm


class _PythiaBlock(nn.Module):
    """Layer norm before attention and before the MLP; parallel: both see the block's input."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.parallel = model.attention == "parallel"
        self.input_layernorm = _layer_norm(model)
        self.post_attention_layernorm = _layer_norm(model)
        self.attention = _PythiaAttention(model)
        self.mlp = _PythiaMLP(model)

    def forward(self, x_BTD: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        attended_BTD = self.attention(self.input_layernorm(x_BTD), rotation)
        if self.parallel:
            return self.mlp(self.post_attention_layernorm(x_BTD)) + attended_BTD + x_BTD
        x_BTD = attended_BTD + x_BTD
        return self.mlp(self.post_attention_layernorm(x_BTD)) + x_BTD


class _PythiaAttention(nn.Module):
    """One matrix for queries, keys and values, a head after the other."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.heads = model.heads
        self.query_key_value = _linear(model.hidden_size, 3 * model.hidden_size, bias=True)
        self.dense = _linear(model.hidden_size, model.hidden_size, bias=True)

    def forward(self, x_BTD: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = _split_heads(self.query_key_value(x_BTD), self.heads).chunk(3, dim=-1)
        return self.dense(_attend(rotate(q, rotation), rotate(k, rotation), v))


class _PythiaMLP(nn.Module):
    def __init__(self, model: Model) -> None:
        super().__init__()
        self.dense_h_to_4h = _linear(model.hidden_size, model.mlp_size, bias=True)
        self.dense_4h_to_h = _linear(model.mlp_size, model.hidden_size, bias=True)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.dense_4h_to_h(gelu(self.dense_h_to_4h(x_BTD)))


# ---- parts of both ---------------------------------------------------------------------------------------------------


def _split_heads(x_BTD: Tensor, heads: int) -> Tensor:
    """(B, T, H * K) to (B, H, T, K)."""
    return x_BTD.view(*x_BTD.shape[:-1], heads, -1).transpose(1, 2)


def _attend(q_BHTK: Tensor, k_BHTK: Tensor, v_BHTK: Tensor) -> Tensor:
    """Causal attention: (B, T, D)."""
    return scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True).transpose(1, 2).flatten(2)


class _UnsetLinear(nn.Linear):
    """Without weights as yet: torch would draw them from the global random state."""

    def reset_parameters(self) -> None: ...


class _UnsetEmbedding(nn.Embedding):
    """As above. torch's own skip_init does the same, and loads its compiler (800 modules) to do so."""

    def reset_parameters(self) -> None: ...


def _linear(inputs: int, outputs: int, *, bias: bool) -> nn.Linear:
    return _UnsetLinear(inputs, outputs, bias=bias)


def _embedding(model: Model) -> nn.Embedding:
    return _UnsetEmbedding(model.vocab_rows, model.hidden_size)


def _rms_norm(model: Model) -> nn.RMSNorm:
    return nn.RMSNorm(model.hidden_size, eps=model.norm_eps)


def _layer_norm(model: Model) -> nn.LayerNorm:
    return nn.LayerNorm(model.hidden_size, eps=model.norm_eps)
