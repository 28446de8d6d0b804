"""Every variant of every kernel, compiled for GPUs that are not here: instructions, rounding, registers, memory.

The launches are those of real forwards (see compiled_launches.py), so what is checked is what would run.
"""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple

import pytest
import torch
from compiled_launches import FAMILIES, KERNELS, TARGETS, Compiled, Launch, compile_launch, record

from int8moe.contracts import ACTIVATIONS, MoEConfig
from int8moe_triton_gpu.tiles import default_steps

QWEN3 = MoEConfig(num_experts=128, top_k=8, hidden_size=2048, intermediate_size=768)
GPT_OSS = MoEConfig(
    num_experts=32, top_k=4, hidden_size=2880, intermediate_size=2880, activation="swigluoai", has_bias=True
)
QWEN3_NEXT = MoEConfig(num_experts=512, top_k=10, hidden_size=2048, intermediate_size=512)
MANY_SLOTS = MoEConfig(num_experts=256, top_k=128, hidden_size=16, intermediate_size=32)
ODD = MoEConfig(num_experts=9, top_k=3, hidden_size=100, intermediate_size=33, has_bias=True)

SHARED_MOST = {"cuda": 99 * 1024, "hip": 64 * 1024}
"""Bytes of shared memory of one program: NVIDIA's smallest devices from sm_80 on have 99 KiB, gfx942 has 64 KiB."""

LANE_REGISTERS = {"cuda": 255, "hip": 256}
_PROGRAM_REGISTERS = 65_536

# What a matrix multiply-add of int8 into int32 is called. wgmma and tcgen05 want 64 rows.
_INT8_DOT = {
    ("sm_80", False): r"\bIMMA\.16832\.S8\.S8\b",
    ("sm_80", True): r"\bIMMA\.16832\.S8\.S8\b",
    ("sm_90", False): r"\bIMMA\.16832\.S8\.S8\b",
    ("sm_90", True): r"\bIGMMA\.64x\d+x32\.S8\.S8\b",
    ("sm_100", False): r"\bIMMA\.16832\.S8\.S8\b",
    ("sm_100", True): r"\bUTCIMMA\b",
    ("gfx942", False): r"\bv_mfma_i32_\d+x\d+x\d+_i8\b",
    ("gfx942", True): r"\bv_mfma_i32_\d+x\d+x\d+_i8\b",
}


class Forward(NamedTuple):
    """A forward whose launches are compiled."""

    config: MoEConfig
    tokens: int
    dtype: torch.dtype = torch.bfloat16


def forwards(architecture: str) -> list[Forward]:
    """Every activation on both paths, every default tile, every dtype, and every switch of a kernel."""
    steps = default_steps(FAMILIES[architecture])
    rows = [step.rows_per_expert or 10**3 for step in steps.sorted]
    found = [Forward(QWEN3, 1), *(Forward(QWEN3, count * QWEN3.num_experts // QWEN3.top_k) for count in rows)]
    for activation in ACTIVATIONS:
        config = GPT_OSS if activation == "swigluoai" else QWEN3.model_copy(update={"activation": activation})
        found += [Forward(config, 4), Forward(config, 1024)]
    mapped = {"has_expert_map": True, "num_local_experts": 5}
    found += [
        Forward(QWEN3_NEXT, 64),
        Forward(MANY_SLOTS, 300),
        Forward(ODD, 7, torch.float16),
        Forward(ODD, 70, torch.float32),
        Forward(ODD.model_copy(update=mapped), 70, torch.float16),
        Forward(ODD.model_copy(update={"top_k": 1, "apply_router_weight_on_input": True}), 5, torch.bfloat16),
    ]
    return found


@cache
def launches(architecture: str) -> tuple[Launch, ...]:
    family = FAMILIES[architecture]
    return tuple(dict.fromkeys(launch for one in forwards(architecture) for launch in record(*one, family)))


VARIANTS = [
    pytest.param(architecture, launch, id=f"{architecture}-{number:02}-{launch.kernel}")
    for architecture in TARGETS
    for number, launch in enumerate(launches(architecture))
]


@pytest.mark.parametrize(("architecture", "launch"), VARIANTS)
def test_variant(architecture: str, launch: Launch) -> None:
    compiled = compile_launch(launch, architecture)
    backend = TARGETS[architecture].backend
    name = str(launch)
    assert launch.options, name
    assert dict(launch.options)["enable_fp_fusion"] is False, name
    assert_roundings(backend, launch, compiled)
    assert_budget(architecture, launch, compiled)
    if launch.kernel == "grouped_gemm":
        pattern = _INT8_DOT[architecture, launch.constant["BLOCK_M"] >= 64]
        assert re.search(pattern, compiled.machine), f"{name}: no {pattern} in the machine code"


def assert_roundings(backend: str, launch: Launch, compiled: Compiled) -> None:
    """No fused multiply-add, no approximation, no flush of denormals: what makes the bits those of the contract."""
    name = str(launch)
    numbers = compiled.numbers
    if backend == "cuda":
        wrong = [
            word for word in numbers if re.match(r"fma\.|.*\.approx|.*\.ftz|ex2|lg2|tanh|div\.full|rcp|sqrt", word)
        ]
        assert not wrong, f"{name}: PTX has {wrong}"
        # fp32 sums and products of PTX are rounded to nearest; ptxas was told not to fuse them. It divides by a sequence
        # of its own, which is rounded correctly (div.rn): where there is none, no fused multiply-add may be left.
        if not numbers["div.rn.f32"]:
            # HFMA2 is how it moves a constant.
            fused = re.findall(r"\bFFMA\w*\b", compiled.machine)
            assert not fused, f"{name}: SASS has {len(fused)} fused multiply-adds"
    else:
        wrong = [word for word in numbers if re.match(r"v_(exp|log|sqrt|rsq)_f32|v_pk_fma|v_mad_f32|v_mac_f32", word)]
        assert not wrong, f"{name}: AMDGCN has {wrong}"
        # A correctly rounded division is v_div_scale twice, v_rcp, five fused multiply-adds, v_div_fmas, v_div_fixup.
        divisions = numbers["v_div_fixup_f32"]
        fused = sum(count for word, count in numbers.items() if re.match(r"v_(fma|fmac|fmaak)_f32", word))
        assert fused == 5 * divisions, f"{name}: {fused} fused multiply-adds in {divisions} divisions"
        assert re.search(r"\.amdhsa_float_denorm_mode_32 3\b", compiled.assembly), f"{name}: fp32 denormals are flushed"
        assert re.search(r"\.amdhsa_float_round_mode_32 0\b", compiled.assembly), f"{name}: fp32 is not to nearest"


def assert_budget(architecture: str, launch: Launch, compiled: Compiled) -> None:
    name = str(launch)
    backend = TARGETS[architecture].backend
    assert compiled.spilled == 0, f"{name}: {compiled.spilled} spilled"
    assert compiled.shared <= SHARED_MOST[backend], f"{name}: {compiled.shared} bytes of shared memory"
    assert compiled.registers <= LANE_REGISTERS[backend], f"{name}: {compiled.registers} registers"
    if backend == "cuda":
        lanes = 32 * dict(launch.options).get("num_warps", 4)
        assert compiled.registers * lanes <= _PROGRAM_REGISTERS, f"{name}: {compiled.registers} registers a lane"


@pytest.mark.parametrize("architecture", TARGETS)
def test_every_kernel_and_switch_is_among_the_variants(architecture: str) -> None:
    found = launches(architecture)
    assert {launch.kernel for launch in found} == set(KERNELS)
    gemms = [launch.constant for launch in found if launch.kernel == "grouped_gemm"]
    assert {gemm["ACTIVATION"] for gemm in gemms} == {"", *ACTIVATIONS}
    for switch in ("GATED", "HAS_BIAS", "ONE_ROW", "EVEN_K"):
        assert {gemm[switch] for gemm in gemms} == {False, True}, switch
    formats = {launch.constant.get("FORMAT") for launch in found if launch.kernel in ("quantize_rows", "combine")}
    assert formats == {"bfloat16", "float16", "float32"}
    steps = default_steps(FAMILIES[architecture])
    tiles = {tile for step in (steps.one_row, *steps.sorted) for tile in (step.gate_up, step.down)}
    compiled = {(g["BLOCK_M"], g["BLOCK_N"], g["BLOCK_K"]) for g in gemms}
    assert compiled >= {(tile.block_m, tile.block_n, tile.block_k) for tile in tiles}


def test_fused_multiply_adds_are_found_where_they_are_allowed() -> None:
    """The check can fail: the same kernel, with fusion on, has them."""
    launch = next(
        launch for launch in launches("sm_90") if launch.kernel == "combine" and launch.constant["HAS_WEIGHT"]
    )
    allowed = launch._replace(
        options=(*(o for o in launch.options if o[0] != "enable_fp_fusion"), ("enable_fp_fusion", True))
    )
    with pytest.raises(AssertionError, match="fused multiply-adds|PTX has"):
        assert_roundings("cuda", allowed, compile_launch(allowed, "sm_90"))
    on_amd = compile_launch(allowed, "gfx942")
    with pytest.raises(AssertionError, match="fused multiply-adds|AMDGCN has"):
        assert_roundings("hip", allowed, on_amd)
