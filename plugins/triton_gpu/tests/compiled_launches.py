"""Compiles what a forward launches, for a device that is not here, and reads the machine code.

The launches are recorded from the very code of a forward, run on tensors without memory (device "meta"): the arguments,
tiles and specialisations are those that a device would get.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from int8moe.contracts import MoEConfig
from int8moe_triton_gpu import probe
from int8moe_triton_gpu.tiles import default_steps

triton = pytest.importorskip("triton", reason="triton is not installed (make triton-check installs it)")
if probe.read_facts().interpreted:
    pytest.skip("compiles, which TRITON_INTERPRET=1 forbids (make triton-check runs both)", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from int8moe_triton_gpu import forward  # noqa: E402

KERNELS = ("quantize_rows", "place_experts", "lay_out_blocks", "place_slots", "grouped_gemm", "combine")
TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
FAMILIES = {"sm_80": "sm_80", "sm_90": "sm_90", "sm_100": "sm_90", "gfx942": "gfx942"}
"""Architecture -> whose default tiles it takes."""

_TYPES = {
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "fp16",
    torch.float32: "fp32",
}
_OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")


class Launch(NamedTuple):
    """One launch, as the compiler sees it; equal ones are compiled once."""

    kernel: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]

    @property
    def constant(self) -> dict[str, Any]:
        return dict(self.constants)

    def __str__(self) -> str:
        words = [f"{name}={value}" for name, value in (*self.constants, *self.options) if value is not None]
        return f"{self.kernel}({', '.join(words)})"


class Recorder:
    """Stands where a kernel stands in a forward, and writes down how it is called."""

    def __init__(self, kernel: Any, launches: list[Launch]) -> None:
        self._kernel, self._launches = kernel, launches

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        assert all(size > 0 for size in grid), grid
        return self._record

    def _record(self, *args: Any, **kwargs: Any) -> None:
        fn = self._kernel
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        values = dict(zip(fn.arg_names, args, strict=False)) | kwargs
        assert values.keys() == set(fn.arg_names), values.keys() ^ set(fn.arg_names)
        signature, constants, aligned = {}, {}, []
        for parameter in fn.params:
            name, value = parameter.name, values[parameter.name]
            if isinstance(value, torch.Tensor):
                signature[name] = f"*{_TYPES[value.dtype]}"
                if value.storage_offset() * value.element_size() % 16 == 0:  # an allocation begins on more than that
                    aligned.append(name)
            elif parameter.is_constexpr or value is None or (value == 1 and not parameter.do_not_specialize):
                signature[name], constants[name] = "constexpr", value
            elif isinstance(value, float):
                signature[name] = "fp32"
            else:
                signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
                if value % 16 == 0 and not parameter.do_not_specialize:
                    aligned.append(name)
        self._launches.append(
            Launch(fn.__name__, tuple(signature.items()), tuple(constants.items()), tuple(aligned),
                   tuple(options.items()))
        )  # fmt: skip


def record(config: MoEConfig, tokens: int, dtype: torch.dtype, family: str) -> list[Launch]:
    """The launches of a forward with the default tiles of a family of devices."""
    launches: list[Launch] = []
    with recorders(launches):
        meta_forward(config, tokens, dtype, family)
    return launches


def meta_forward(config: MoEConfig, tokens: int, dtype: torch.dtype, family: str) -> None:
    """A forward on tensors without memory; a look at a value of theirs would raise."""
    experts, rows, hidden, inner = config.local_experts, config.w13_rows, config.hidden_size, config.intermediate_size

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    layer = forward.Layer(
        w13=empty(experts, rows, hidden, dtype=torch.int8),
        w13_scale=empty(experts, rows),
        w13_bias=empty(experts, rows) if config.has_bias else None,
        w2=empty(experts, hidden, inner, dtype=torch.int8),
        w2_scale=empty(experts, hidden),
        w2_bias=empty(experts, hidden) if config.has_bias else None,
        expert_map=empty(config.num_experts, dtype=torch.int32) if config.has_expert_map else None,
        num_experts=config.num_experts,
        activation=config.activation,
        gated=config.is_gated,
        alpha=config.swiglu_alpha,
        limit=config.swiglu_limit,
        steps=default_steps(family),
    )
    x = empty(tokens, hidden, dtype=dtype)
    forward.forward(
        layer,
        x,
        empty(tokens, config.top_k),
        empty(tokens, config.top_k, dtype=torch.int64),
        torch.empty_like(x),
        weight_on_input=config.apply_router_weight_on_input,
    )


@contextmanager
def recorders(launches: list[Launch]):
    """Replace the kernels of a forward by recorders."""
    kept = {name: getattr(forward, name) for name in KERNELS}
    try:
        for name, kernel in kept.items():
            setattr(forward, name, Recorder(kernel, launches))
        yield
    finally:
        for name, kernel in kept.items():
            setattr(forward, name, kernel)


class Compiled(NamedTuple):
    """One launch, compiled.

    Attributes:
        assembly: PTX, or AMDGCN.
        machine: SASS of NVIDIA; for AMD the same as assembly.
        registers: of one lane.
        spilled: bytes or registers that went to memory.
        shared: bytes of shared memory of one program.
    """

    assembly: str
    machine: str
    registers: int
    spilled: int
    shared: int
    numbers: Counter[str]


@cache
def compile_launch(launch: Launch, architecture: str) -> Compiled:
    """Compile for one of TARGETS."""
    fn = getattr(forward, launch.kernel)
    attrs = {(fn.arg_names.index(name),): [["tt.divisibility", 16]] for name in launch.aligned}
    source = ASTSource(fn, dict(launch.signature), launch.constant, attrs)
    kernel = triton.compile(source, target=TARGETS[architecture], options=dict(launch.options))
    shared = kernel.metadata.shared
    if "ptx" in kernel.asm:
        machine, registers, spilled = _read_cubin(kernel.asm["cubin"])
        assembly = kernel.asm["ptx"]
        numbers = Counter(re.findall(r"^\s*(?:@!?%\w+\s+)?([a-z][\w.]*)\b", assembly, re.MULTILINE))
    else:
        assembly = machine = kernel.asm["amdgcn"]
        registers = _number(r"\.vgpr_count:\s+(\d+)", assembly)
        spilled = sum(_number(rf"\.{name}:\s+(\d+)", assembly) for name in ("vgpr_spill_count", "sgpr_spill_count"))
        spilled += _number(r"\.private_segment_fixed_size:\s+(\d+)", assembly)
        numbers = Counter(re.findall(r"^\s+([a-z]\w+)\b", assembly, re.MULTILINE))
    return Compiled(assembly, machine, registers, spilled, shared, numbers)


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, pattern
    return int(found[1])


def _tool(name: str) -> str:
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def _read_cubin(cubin: bytes) -> tuple[str, int, int]:
    """SASS, registers, and bytes of stack and local memory."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        sass = subprocess.run([_tool("nvdisasm"), "-c", path], capture_output=True, text=True, check=True).stdout
        usage = subprocess.run(
            [_tool("cuobjdump"), "-res-usage", path], capture_output=True, text=True, check=True
        ).stdout
    return sass, _number(r"REG:(\d+)", usage), _number(r"STACK:(\d+)", usage) + _number(r"LOCAL:(\d+)", usage)
