"""A quantised Qwen3-MoE in plain PyTorch, from the tensors of its checkpoint: no transformers, no kernels, no packing.

Linears are W8A8 as docs/numerics.md quantises rows, experts are int8moe.reference, all else is fp32.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from int8moe import reference


class PlainQwen3MoE:
    """Takes tokens one after another and keeps their keys and values."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.tensors = load_file(str(folder / "model.safetensors"))
        self.heads, self.kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        self.size = self.config["head_dim"]
        self.layers = range(self.config["num_hidden_layers"])
        self.cache: list[tuple[list[Tensor], list[Tensor]]] = [([], []) for _ in self.layers]
        self.experts = [self.stack(f"model.layers.{layer}.mlp.experts") for layer in self.layers]

    def get(self, name: str) -> Tensor:
        return self.tensors[name].float()

    def stack(self, prefix: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        def all_experts(role: str, part: str) -> Tensor:
            names = [f"{prefix}.{e}.{role}_proj.{part}" for e in range(self.config["num_local_experts"])]
            return torch.stack([self.tensors[name] for name in names])

        w13 = torch.cat([all_experts("gate", "weight"), all_experts("up", "weight")], dim=1)
        scale13 = torch.cat([all_experts("gate", "weight_scale"), all_experts("up", "weight_scale")], dim=1)
        w2, scale2 = all_experts("down", "weight"), all_experts("down", "weight_scale")
        return w13, scale13.squeeze(-1).float(), w2, scale2.squeeze(-1).float()

    def norm(self, x: Tensor, name: str) -> Tensor:
        return (
            x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]) * self.get(f"{name}.weight")
        )

    def linear(self, x: Tensor, name: str) -> Tensor:
        q, scale = reference.quantize_rows(x)
        sums = reference.integer_matmul(q, self.tensors[f"{name}.weight"]).float()
        return sums * scale[:, None] * self.get(f"{name}.weight_scale").reshape(1, -1)

    def rotate(self, x: Tensor, position: int) -> Tensor:
        half = self.size // 2
        frequencies = self.config["rope_parameters"]["rope_theta"] ** (-torch.arange(half) / half)
        cos, sin = (position * frequencies).cos(), (position * frequencies).sin()
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)

    def attention(self, x: Tensor, layer: int, position: int) -> Tensor:
        prefix = f"model.layers.{layer}.self_attn"
        q, k, v = (self.linear(x, f"{prefix}.{part}_proj").view(-1, self.size) for part in "qkv")
        q = self.rotate(self.norm(q, f"{prefix}.q_norm"), position)
        keys, values = self.cache[layer]
        keys.append(self.rotate(self.norm(k, f"{prefix}.k_norm"), position))
        values.append(v)
        share = self.heads // self.kv_heads
        all_keys, all_values = (torch.stack(kept).repeat_interleave(share, dim=1) for kept in (keys, values))
        scores = torch.einsum("hd,thd->ht", q, all_keys) / self.size**0.5
        out = torch.einsum("ht,thd->hd", scores.softmax(-1), all_values)
        return self.linear(out.reshape(1, -1), f"{prefix}.o_proj")

    def moe(self, x: Tensor, layer: int) -> Tensor:
        scores = (x @ self.get(f"model.layers.{layer}.mlp.gate.weight").t()).softmax(-1)
        weights, ids = scores.topk(self.config["num_experts_per_tok"])
        weights = weights / weights.sum(-1, keepdim=True)
        return reference.fused_experts(x, *self.experts[layer], weights, ids, activation="silu")

    def step(self, token: int, position: int) -> Tensor:
        """Logits ``[vocabulary]`` after one more token."""
        x = self.get("model.embed_tokens.weight")[token][None]
        for layer in self.layers:
            prefix = f"model.layers.{layer}"
            x = x + self.attention(self.norm(x, f"{prefix}.input_layernorm"), layer, position)
            x = x + self.moe(self.norm(x, f"{prefix}.post_attention_layernorm"), layer)
        return (self.norm(x, "model.norm") @ self.get("lm_head.weight").t())[0]

    def continue_greedily(self, prompt: list[int], count: int) -> list[int]:
        for position, token in enumerate(prompt):
            logits = self.step(token, position)
        found = [int(logits.argmax())]
        while len(found) < count:
            found.append(int(self.step(found[-1], len(prompt) + len(found) - 1).argmax()))
        return found
