"""The frozen data that core and plugins exchange. Imports no torch.

Everything here is a pydantic model that takes keywords only, refuses unknown ones and cannot be
changed afterwards. A bad value raises :class:`int8moe.errors.ConfigError` with one line a fault.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from .errors import ConfigError

PLUGIN_API_VERSION = 1
"""Version of the hooks and of KernelSpec; a kernel that declares another one is not loaded."""

NUMERICS_VERSION = 1
"""Version of docs/numerics.md. Packed weights and bitwise declarations carry it."""

MAX_REDUCTION = 65_793
"""Largest hidden_size or intermediate_size: 65,793 * 255 * 128 < 2**31, so no int32 sum overflows, not even with
offset (unsigned) weights against the whole range of int8."""

Activation = Literal[
    "silu",
    "gelu",
    "gelu_tanh",
    "swigluoai",
    "silu_no_mul",
    "gelu_no_mul",
    "gelu_tanh_no_mul",
    "relu2_no_mul",
]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)

FEATURES = ("bias", "no_gate", "expert_map", "apply_router_weight_on_input")
"""What a config may need beyond activation and dtype; a kernel lists those that it has."""

HiddenDtype = Literal["bfloat16", "float16", "float32"]
HIDDEN_DTYPES: tuple[HiddenDtype, ...] = get_args(HiddenDtype)


class _Frozen(BaseModel):
    # Built at first use: most processes need few of these models, and the command line has to start fast.
    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, defer_build=True)

    def __init__(self, **fields: Any) -> None:
        try:
            super().__init__(**fields)
        except ValidationError as error:
            faults = "; ".join(
                f"{'.'.join(map(str, fault['loc'])) or 'fields'}: {fault['msg'].removeprefix('Value error, ')}"
                f" (found {fault['input']!r})"
                for fault in error.errors()
            )
            raise ConfigError(f"{type(self).__name__}: {faults}") from None


class MoEConfig(_Frozen):
    """What one layer of routed experts computes.

    Attributes:
        num_experts: experts that ids name; the global count under expert parallelism.
        top_k: slots per token (columns of topk_ids).
        hidden_size: H, the width of hidden_states.
        intermediate_size: I, the width of one expert's hidden layer.
        activation: one of ACTIVATIONS; those ending in ``_no_mul`` have no gate.
        has_bias: w13_bias and w2_bias exist.
        apply_router_weight_on_input: scale the input, not the output, by the router weight (top_k 1 only).
        swiglu_alpha: alpha of ``swigluoai``; kernels compute with it rounded to fp32, where it must be finite.
        swiglu_limit: clamp of ``swigluoai``; rounded to fp32 it must be finite and above 0.
        hidden_dtype: "bfloat16", "float16" or "float32" (torch dtypes are taken too); None = any of them.
        num_local_experts: experts whose weights live in this layer; None = num_experts, which is also the most.
        has_expert_map: an expert_map of global to local ids is given with the layer.
    """

    num_experts: int = Field(ge=1)
    top_k: int = Field(ge=1)
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    activation: Activation = "silu"
    has_bias: bool = False
    apply_router_weight_on_input: bool = False
    swiglu_alpha: float = Field(default=1.702, allow_inf_nan=False)
    swiglu_limit: float = Field(default=7.0, gt=0.0, allow_inf_nan=False)
    hidden_dtype: HiddenDtype | None = None
    num_local_experts: int | None = Field(default=None, ge=0)
    has_expert_map: bool = False

    @field_validator("hidden_dtype", mode="before")
    @classmethod
    def _dtype_name(cls, value: Any) -> Any:
        return value if value is None else str(value).removeprefix("torch.")

    @field_validator("swiglu_alpha", "swiglu_limit")
    @classmethod
    def _fits_float32(cls, value: float, info: ValidationInfo) -> float:
        try:
            (rounded,) = struct.unpack("<f", struct.pack("<f", value))
        except OverflowError:
            raise ValueError("kernels compute with it in float32, where it is not finite") from None
        if info.field_name == "swiglu_limit" and rounded <= 0.0:
            raise ValueError("kernels compute with it in float32, where it is 0; it must be above 0")
        return value

    @model_validator(mode="after")
    def _consistent(self) -> MoEConfig:
        if self.apply_router_weight_on_input and self.top_k != 1:
            raise ValueError(f"apply_router_weight_on_input needs top_k = 1, found top_k = {self.top_k}")
        if not self.has_expert_map and self.num_local_experts not in (None, self.num_experts):
            raise ValueError("num_local_experts differs from num_experts: give an expert_map too")
        if self.local_experts > self.num_experts:
            raise ValueError(
                f"num_local_experts = {self.num_local_experts} is more than num_experts = {self.num_experts}, "
                "the global count"
            )
        return self

    @property
    def is_gated(self) -> bool:
        """Whether w13 stacks a gate and an up projection."""
        return not self.activation.endswith("_no_mul")

    @property
    def w13_rows(self) -> int:
        """Rows of w13 for one expert: 2 * I with a gate, I without."""
        return self.intermediate_size * (2 if self.is_gated else 1)

    @property
    def needed_features(self) -> tuple[str, ...]:
        """Those of FEATURES that a kernel has to list."""
        needs = (self.has_bias, not self.is_gated, self.has_expert_map, self.apply_router_weight_on_input)
        return tuple(feature for feature, needed in zip(FEATURES, needs, strict=True) if needed)

    @property
    def local_experts(self) -> int:
        """Experts stored in this layer."""
        return self.num_experts if self.num_local_experts is None else self.num_local_experts


class QuantScheme(_Frozen):
    """How weights and activations are quantised. The one scheme of this version is ``w8a8``."""

    name: str = "w8a8"
    weight_bits: int = 8
    weight_strategy: Literal["channel"] = "channel"
    activation_bits: int = 8
    activation_strategy: Literal["token"] = "token"
    symmetric: bool = True
    dynamic_activations: bool = True


class HostInfo(_Frozen):
    """What the operating system says about this machine.

    Attributes:
        machine: as ``uname -m`` prints it.
        system: "Linux", "Darwin", "Windows".
        features: the CPU's feature words as the system spells them (lower case on Darwin); no meaning is given to them.
        num_threads: workers that a kernel may use.
        num_threads_source: where that number is from, for people.
    """

    machine: str
    system: str
    features: frozenset[str] = frozenset()
    num_threads: int = Field(default=1, ge=1)
    num_threads_source: str = "default"


class Numerics(_Frozen):
    """What a kernel promises about its results; made by :meth:`bitwise` or :meth:`tolerance`."""

    kind: Literal["bitwise", "tolerance"]
    version: int = NUMERICS_VERSION
    rtol: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    atol: float = Field(default=0.0, ge=0.0, allow_inf_nan=False)
    reason: str = ""

    @classmethod
    def bitwise(cls, *, version: int = NUMERICS_VERSION) -> Numerics:
        """The bits of docs/numerics.md in that version."""
        return cls(kind="bitwise", version=version)

    @classmethod
    def tolerance(cls, *, rtol: float, reason: str, atol: float = 0.0, version: int = NUMERICS_VERSION) -> Numerics:
        """Within rtol (relative L2 error of a token's output) or atol (absolute, each element), and why not exact."""
        return cls(kind="tolerance", version=version, rtol=rtol, atol=atol, reason=reason)

    @model_validator(mode="after")
    def _consistent(self) -> Numerics:
        if self.kind == "tolerance" and not self.reason:
            raise ValueError("a tolerance needs the reason why the kernel is not bitwise")
        if self.kind == "tolerance" and self.rtol == 0.0 and self.atol == 0.0:
            raise ValueError("a tolerance of zero is bitwise: use Numerics.bitwise()")
        return self

    def __str__(self) -> str:
        if self.kind == "bitwise":
            return "bitwise"
        return f"tolerance(rtol={self.rtol:g}, atol={self.atol:g}): {self.reason}"


class WeightLayout(_Frozen):
    """The tag of a layer's weights: who packed them, how, and for which numerics.

    Attributes:
        namespace: plugin namespace that owns the layout; "int8moe" for the canonical one.
        name: by the grammar dtype, columns per block, depth per block, appendix (``u8_n16k4``), or "canonical".
        version: of the layout; raise it when packed bytes change their meaning.
        numerics_version: NUMERICS_VERSION when packed.
        nbytes: bytes of all packed weights of the layer, padding included; None where not stated.
    """

    namespace: str
    name: str
    version: int = 1
    numerics_version: int = NUMERICS_VERSION
    nbytes: int | None = None

    @classmethod
    def canonical(cls) -> WeightLayout:
        """Row-major int8 as loaded: w13 ``[E, 2I, H]``, w2 ``[E, H, I]``."""
        return cls(namespace="int8moe", name="canonical")

    @property
    def is_canonical(self) -> bool:
        """Whether the tensors are the canonical ones."""
        return (self.namespace, self.name) == ("int8moe", "canonical")

    @property
    def tag(self) -> str:
        """One string that two layers share exactly when their bytes mean the same."""
        return f"{self.namespace}:{self.name}:{self.version}:{self.numerics_version}"


class KernelSpec(_Frozen):
    """What a provider declares about one kernel, before any of its code is loaded.

    Attributes:
        name: "<namespace>.<kernel>", the namespace being the entry point's name.
        target: "module:Class" of the hook implementations, imported when the kernel is chosen; or the class.
        api_version: PLUGIN_API_VERSION that the kernel was written for.
        device: torch device type.
        isa: feature sets, any one of which is enough; () = any machine. Words as HostInfo.features has them.
        schemes: names of quantisation schemes.
        activations: subset of ACTIVATIONS.
        dtypes: hidden dtypes, subset of HIDDEN_DTYPES.
        features: what else it can do: "bias", "no_gate", "expert_map", "apply_router_weight_on_input".
            A config that needs one which is not listed is refused.
        layout: name of the WeightLayout that its packing returns; "canonical" when it packs nothing.
        numerics: what it promises.
        priority: 0 reference, 10-39 portable, 40-69 vector ISA, 70-89 matrix unit; the highest usable wins.
        auto_select: False = only ever used when named.
        unavailable: the plugin's own finding why the kernel cannot run on this machine (library missing, a
            register state that the system does not enable); None when it can.
        docs_url: where to read about it.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9_]+\.[A-Za-z0-9_]+$")
    target: str | type
    api_version: int = PLUGIN_API_VERSION
    device: str = "cpu"
    isa: tuple[tuple[str, ...], ...] = ()
    schemes: tuple[str, ...] = ("w8a8",)
    activations: tuple[Activation, ...]
    dtypes: tuple[HiddenDtype, ...]
    features: tuple[str, ...] = ()
    layout: str
    numerics: Numerics
    priority: int = Field(default=50, ge=0, le=100)
    auto_select: bool = True
    unavailable: str | None = None
    docs_url: str | None = None

    @field_validator("target")
    @classmethod
    def _target_form(cls, value: str | type) -> str | type:
        if isinstance(value, str):
            module, colon, attribute = value.partition(":")
            if not (module and colon and attribute):
                raise ValueError('a target is written "module:Class"')
        return value

    @property
    def namespace(self) -> str:
        """The part of the name before the dot."""
        return self.name.partition(".")[0]

    @property
    def short_name(self) -> str:
        """The part of the name after the dot; the rung on the provider's isa_ladder."""
        return self.name.partition(".")[2]


class Supported(_Frozen):
    """Answer of ``is_supported_config``: this kernel can serve the config."""

    def __bool__(self) -> bool:
        return True


class Unsupported(_Frozen):
    """Answer of ``is_supported_config``: it cannot, because of ``reason``."""

    reason: str = Field(min_length=1)

    def __init__(self, reason: str | None = None, **fields: Any) -> None:
        super().__init__(**({} if reason is None else {"reason": reason}), **fields)

    def __bool__(self) -> bool:
        return False


class Rejection(NamedTuple):
    """One kernel that was not chosen, and why."""

    name: str
    distribution: str
    reason: str


class SelectionReport(_Frozen):
    """Outcome of one selection.

    Attributes:
        chosen: name of the kernel that serves the layer.
        rejected: every candidate that was refused, best first, with its reason.
        outranked: usable kernels that the chosen one beat on priority.
        pinned: who named the kernel ("kernel=" or "INT8MOE_KERNEL"); None = chosen automatically.
    """

    chosen: str
    rejected: tuple[Rejection, ...] = ()
    outranked: tuple[str, ...] = ()
    pinned: str | None = None

    def __str__(self) -> str:
        how = f"named by {self.pinned}" if self.pinned else "highest priority of those usable"
        lines = [f"{self.chosen}: chosen ({how})"]
        lines += [f"{name}: usable, lower priority" for name in self.outranked]
        lines += [f"{name} ({distribution}): {reason}" for name, distribution, reason in self.rejected]
        return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class KernelInfo:
    """One row of :func:`int8moe.list_kernels`. ``reason`` is "" when the kernel is available."""

    name: str
    distribution: str
    version: str
    device: str
    isa: tuple[tuple[str, ...], ...]
    available: bool
    reason: str
    layout: str
    numerics: str
    priority: int


@dataclass(frozen=True, kw_only=True)
class PluginInfo:
    """One discovered provider. ``error`` is "" unless the state is not "loaded"."""

    name: str
    distribution: str
    version: str
    state: Literal["loaded", "blocked", "broken", "incompatible", "duplicate"]
    error: str
