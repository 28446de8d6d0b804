"""Kernels that are wrong on purpose, each in one way that its self-test does not see."""

from __future__ import annotations

import os
from typing import ClassVar

import torch

from int8moe import KernelSpec, Numerics, WeightLayout, hookimpl
from int8moe.contracts import ACTIVATIONS, HIDDEN_DTYPES
from int8moe.reference import ReferenceExperts, fused_experts


def in_self_test(config) -> bool:
    """Whether this is the layer that binding proves a kernel on."""
    return (config.num_experts, config.hidden_size, config.intermediate_size) == (4, 67, 33)


class Wrong(ReferenceExperts):
    """The reference, with ``spoil`` called on what it wrote."""

    @hookimpl
    def apply(self, layer, hidden_states, topk_weights, topk_ids, out):
        super().apply(layer, hidden_states, topk_weights, topk_ids, out)
        if not in_self_test(layer.config):
            self.spoil(layer, hidden_states, topk_weights, topk_ids, out)

    def spoil(self, layer, hidden_states, topk_weights, topk_ids, out):
        raise NotImplementedError


class OneBit(Wrong):
    """One bit off in one output."""

    def spoil(self, layer, hidden_states, topk_weights, topk_ids, out):
        if out.numel() > 5:
            integers = {2: torch.int16, 4: torch.int32}[out.element_size()]
            out.view(integers).view(-1)[5] ^= 1


class No128(Wrong):
    """Takes -128 for -127, as a kernel does that negates int8."""

    def spoil(self, layer, hidden_states, topk_weights, topk_ids, out):
        config = layer.config
        out.copy_(
            fused_experts(
                hidden_states,
                layer.w13_weight.clamp(min=-127),
                layer.w13_weight_scale,
                layer.w2_weight.clamp(min=-127),
                layer.w2_weight_scale,
                topk_weights,
                topk_ids,
                activation=config.activation,
                w13_bias=layer.w13_bias,
                w2_bias=layer.w2_bias,
                expert_map=layer.expert_map,
                apply_router_weight_on_input=config.apply_router_weight_on_input,
                swiglu_alpha=config.swiglu_alpha,
                swiglu_limit=config.swiglu_limit,
            )
        )


class Seventeen(Wrong):
    """Forgets the last row of 17."""

    def spoil(self, layer, hidden_states, topk_weights, topk_ids, out):
        if len(out) == 17:
            out[16] = 0


class WritesInput(Wrong):
    """Writes into the caller's router weights."""

    def spoil(self, layer, hidden_states, topk_weights, topk_ids, out):
        if topk_weights.numel():
            topk_weights[0, 0] = 1.0


class IgnoresMinusOne(Wrong):
    """Takes id -1 for the last expert, as an index does."""

    def spoil(self, layer, hidden_states, topk_weights, topk_ids, out):
        if bool((topk_ids == -1).any()) and layer.expert_map is None:
            ids = torch.where(topk_ids == -1, layer.config.num_experts - 1, topk_ids)
            ReferenceExperts.apply(self, layer, hidden_states, topk_weights, ids, out)


class Strided(Wrong):
    """Reads hidden states as if they were contiguous."""

    def spoil(self, layer, hidden_states, topk_weights, topk_ids, out):
        if hidden_states.stride(0) > hidden_states.shape[1] and len(out) > 1:
            flat = hidden_states.as_strided(hidden_states.shape, (hidden_states.shape[1], 1))
            ReferenceExperts.apply(self, layer, flat, topk_weights, topk_ids, out)


class Batched(Wrong):
    """Uses a per-batch activation scale: a row depends on its neighbours."""

    def spoil(self, layer, hidden_states, topk_weights, topk_ids, out):
        if len(out) > 1 and hidden_states.shape[1] == 64:
            out += (hidden_states.float().abs().amax() * 0.001).to(out.dtype)


class ZeroTimesNaN(Wrong):
    """Multiplies left-out slots by zero, instead of leaving them out."""

    def spoil(self, layer, hidden_states, topk_weights, topk_ids, out):
        bad = ~torch.isfinite(hidden_states.float()).all(dim=1)
        out[bad] = float("nan")


class Lossy(Wrong):
    """Says canonical, and clears one weight while packing."""

    def spoil(self, layer, hidden_states, topk_weights, topk_ids, out):
        pass

    @hookimpl
    def process_weights_after_loading(self, layer):
        if not in_self_test(layer.config):
            layer.w2_weight.view(-1)[-1] = 0
        return WeightLayout.canonical()


class OtherLayout(Wrong):
    """Returns a layout that it did not state; the core must not take it."""

    def spoil(self, layer, hidden_states, topk_weights, topk_ids, out):
        pass

    @hookimpl
    def process_weights_after_loading(self, layer):
        if in_self_test(layer.config):
            return WeightLayout.canonical()
        return WeightLayout(namespace="wrong", name="i8_n16k4")


class Flushes(Wrong):
    """Flushes denormals."""

    def spoil(self, layer, hidden_states, topk_weights, topk_ids, out):
        smallest = torch.finfo(out.dtype).smallest_normal
        out[out.abs() < smallest] = 0


class Rows(Wrong):
    """Wrong in apply_rows only."""

    def spoil(self, layer, hidden_states, topk_weights, topk_ids, out):
        pass

    @hookimpl
    def apply_rows(self, layer, rows, row_scales, num_tokens_per_expert, out):
        super().apply_rows(layer, rows, row_scales, num_tokens_per_expert, out)
        if out.numel():
            out[-1, -1] += 1e-3


class SetsThreads(Wrong):
    """Takes one thread for itself, and leaves the process with it."""

    def spoil(self, layer, hidden_states, topk_weights, topk_ids, out):
        torch.set_num_threads(1)


class Seeds(Wrong):
    """Starts the caller's random numbers anew."""

    def spoil(self, layer, hidden_states, topk_weights, topk_ids, out):
        torch.manual_seed(0)


class SetsVariable(Wrong):
    """Writes into the environment, while it packs."""

    def spoil(self, layer, hidden_states, topk_weights, topk_ids, out):
        pass

    @hookimpl
    def process_weights_after_loading(self, layer):
        os.environ["OMP_NUM_THREADS"] = "1"
        return WeightLayout.canonical()


class Keeps(Wrong):
    """Keeps the hidden states of every call."""

    kept: ClassVar[list[torch.Tensor]] = []

    def spoil(self, layer, hidden_states, topk_weights, topk_ids, out):
        self.kept.append(hidden_states)


class EightSlots(Wrong):
    """Has room for eight slots of a token."""

    def spoil(self, layer, hidden_states, topk_weights, topk_ids, out):
        if topk_ids.shape[1] > 8:
            ReferenceExperts.apply(self, layer, hidden_states, topk_weights[:, :8], topk_ids[:, :8], out)


class TooManyBytes(Wrong):
    """Says that its packed weights take more bytes than the layer has."""

    layout = "i8_as_it_was"

    def spoil(self, layer, hidden_states, topk_weights, topk_ids, out):
        pass

    @hookimpl
    def process_weights_after_loading(self, layer):
        return WeightLayout(namespace="wrong", name=self.layout, nbytes=2**40)


class SelfTest(ReferenceExperts):
    """One bit off everywhere: does not come through its self-test."""

    @hookimpl
    def apply(self, layer, hidden_states, topk_weights, topk_ids, out):
        super().apply(layer, hidden_states, topk_weights, topk_ids, out)
        integers = {2: torch.int16, 4: torch.int32}[out.element_size()]
        out.view(integers).view(-1)[0] ^= 1


CAUGHT_BY = {
    OneBit: "bits",
    No128: "integers",
    Seventeen: "batch",
    WritesInput: "operator",
    IgnoresMinusOne: "routing",
    Strided: "strides",
    Batched: "batch",
    ZeroTimesNaN: "special",
    Flushes: "special",
    Lossy: "packing",
    OtherLayout: "declaration",
    Rows: "rows",
    SetsThreads: "process",
    Seeds: "process",
    SetsVariable: "process",
    Keeps: "process",
    EightSlots: "routing",
    TooManyBytes: "declaration",
    SelfTest: "declaration",
}


class Provider:
    """Declares one kernel of the given class, in the namespace ``wrong``."""

    def __init__(self, cls: type, **fields: object) -> None:
        self.cls, self.fields = cls, fields

    @hookimpl
    def register_kernels(self):
        declared = {
            "name": f"wrong.{self.cls.__name__.lower()}",
            "target": self.cls,
            "activations": ACTIVATIONS,
            "dtypes": HIDDEN_DTYPES,
            "features": ("bias", "no_gate", "expert_map", "apply_router_weight_on_input"),
            "layout": getattr(self.cls, "layout", "canonical"),
            "numerics": Numerics.bitwise(),
            "priority": 1,
        }
        return [KernelSpec(**(declared | self.fields))]
