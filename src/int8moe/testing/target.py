"""The kernel under test, and what cases do with it: capabilities are asked for, never names."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Collection, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from ..binding import BoundKernel, bind
from ..contracts import Activation, MoEConfig
from ..host import this_host
from ..registry import get_registry
from .bits import assert_matches
from .case import skip
from .makers import Experts, make_experts, make_hidden_states, make_routing, reference_output, threads
from .narrowing import WHOLE, Narrowing

if TYPE_CHECKING:
    from ..layer import FusedMoE

T = TypeVar("T", bound=str)

THREADS = (1, 2, 3)
_REMEMBERED = 20_000
_remembered: dict[bytes, Tensor] = {}


def remembered_output(
    config: MoEConfig, experts: Experts, inputs: tuple[Tensor, Tensor, Tensor], expert_map: Tensor | None = None
) -> Tensor:
    """Return the reference's answer; the same question is computed once a process, for all kernels."""
    digest = hashlib.blake2b(config.model_dump_json().encode(), digest_size=16)
    for name, tensor in (*experts.tensors().items(), *zip("xwi", inputs, strict=True), ("map", expert_map)):
        if tensor is not None:
            plain = tensor.detach().contiguous()
            digest.update(f"{name}{plain.dtype}{tuple(plain.shape)}".encode())
            digest.update(ctypes.string_at(plain.data_ptr(), plain.numel() * plain.element_size()))
    key = digest.digest()
    if key not in _remembered:
        if len(_remembered) >= _REMEMBERED:
            _remembered.clear()
        with threads(1):
            _remembered[key] = reference_output(config, experts, *inputs, expert_map=expert_map)
    return _remembered[key].clone()


def _left(what: str, declared: Iterable[T], wanted: Collection[str]) -> list[T]:
    """Those of the declared names that are wanted; the case is skipped where that leaves none."""
    names = [name for name in declared if not wanted or name in wanted]
    if wanted and not names:
        skip(f"{what} {' or '.join(wanted)} is not declared")
    return names


def copy_with_strides(tensor: Tensor, device: str) -> Tensor:
    """Copy the whole storage, and look at it as ``tensor`` does; ``Tensor.to`` would close the gaps."""
    elements = tensor.untyped_storage().nbytes() // tensor.element_size()
    storage = tensor.detach().as_strided((elements,), (1,), 0).to(device)
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class Target:
    """One registered kernel.

    Attributes:
        name: "<namespace>.<kernel>".
        spec: what its provider declares.
        live: registered by ``register_kernel`` in this process, so that no other process can find it.
        threads: thread counts that comparisons are repeated with.
        narrowing: what is left of the suite; the properties below leave out the rest, ``spec`` does not.
    """

    def __init__(self, name: str, *, threads: Iterable[int] = THREADS, narrowing: Narrowing = WHOLE) -> None:
        """Find the kernel; NoKernelError where there is none of that name."""
        candidate = get_registry().find(name)
        self.name = name
        self.spec = candidate.spec
        self.distribution = candidate.distribution
        self.live = candidate.distribution == "(registered live)"
        self.threads = tuple(threads)
        self.narrowing = narrowing

    @cached_property
    def bound(self) -> BoundKernel:
        """The loaded kernel; raises what binding raises."""
        return bind(self.name)

    # ---- capabilities --------------------------------------------------------------------------------------

    @property
    def activations(self) -> tuple[Activation, ...]:
        """Declared activations that a config may ask for, those with a gate first."""
        names = [a for a in self.spec.activations if not a.endswith("_no_mul")]
        if "no_gate" in self.spec.features:
            names += [a for a in self.spec.activations if a.endswith("_no_mul")]
        return tuple(_left("activation", names, self.narrowing.activations))

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Declared dtypes of hidden_states."""
        names = _left("dtype", self.spec.dtypes, self.narrowing.dtypes)
        return tuple(getattr(torch, name) for name in names)

    def dtype(self, index: int = 0) -> torch.dtype:
        """Return one of the declared dtypes, the first or another in turn."""
        return self.dtypes[index % len(self.dtypes)]

    def need_feature(self, feature: str) -> None:
        """Skip the case unless the kernel lists the feature."""
        if feature not in self.spec.features:
            skip(f"feature {feature!r} is not declared")

    def need_dtype(self, dtype: torch.dtype) -> None:
        """Skip the case unless the kernel takes the dtype."""
        self._need("dtype", str(dtype).removeprefix("torch."), self.spec.dtypes, self.narrowing.dtypes)

    def need_config(self, config: MoEConfig) -> None:
        """Skip the case where the kernel's declaration, or its own hook, refuses the config, or narrowing does."""
        self._need("activation", config.activation, self.spec.activations, self.narrowing.activations)
        shape = config.hidden_size, config.intermediate_size
        if self.narrowing.shapes and shape not in self.narrowing.shapes:
            skip(f"the run is only about {self.narrowing}")
        for feature in config.needed_features:
            self.need_feature(feature)
        reason = self.bound.refusal(config, this_host())
        if reason is not None:
            skip(f"is_supported_config: {reason}")

    def _need(self, what: str, word: str, declared: Iterable[str], wanted: Iterable[str]) -> None:
        if word not in declared:
            skip(f"{what} {word!r} is not declared")
        if wanted and word not in wanted:
            skip(f"the run is only about {self.narrowing}")

    def config(self, **fields: Any) -> MoEConfig:
        """Make a config of four small experts with the kernel's first activation; ``fields`` replace any of it."""
        if not self.activations:
            skip("no declared activation can be asked for")
        hidden_size, intermediate_size = self.narrowing.shapes[0] if self.narrowing.shapes else (64, 48)
        defaults = {
            "num_experts": 4,
            "top_k": 2,
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "activation": self.activations[0],
        }
        return MoEConfig(**(defaults | fields))

    # ---- work ----------------------------------------------------------------------------------------------

    def layer(
        self,
        config: MoEConfig,
        experts: Experts | None = None,
        *,
        seed: int = 0,
        expert_map: Tensor | None = None,
        packed: bool = True,
    ) -> FusedMoE:
        """Make a layer pinned to this kernel, loaded and (unless told otherwise) packed."""
        self.need_config(config)
        experts = make_experts(config, seed=seed) if experts is None else experts
        layer = self.empty_layer(config, expert_map=expert_map)
        layer.load_weights(**experts.tensors())
        if packed:
            layer.process_weights_after_loading()
        return layer

    def empty_layer(self, config: MoEConfig, *, expert_map: Tensor | None = None) -> FusedMoE:
        """Make a layer pinned to this kernel, on its device, without weights."""
        from ..layer import FusedMoE

        return FusedMoE(config, kernel=self.name, expert_map=expert_map, device=self.spec.device)

    def to_device(self, tensor: Tensor) -> Tensor:
        """Copy to the kernel's device, strides and all; on the CPU the tensor itself."""
        return tensor if self.spec.device == "cpu" else copy_with_strides(tensor, self.spec.device)

    def forward(self, layer: FusedMoE, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Call the layer without autograd and bring the result to the CPU."""
        with torch.no_grad():
            output = layer(*map(self.to_device, (hidden_states, topk_weights, topk_ids)))
        result: Tensor = output.cpu()
        return result

    def forward_rows(
        self, layer: FusedMoE, rows: Tensor, num_tokens_per_expert: Tensor, row_scales: Tensor | None = None
    ) -> Tensor:
        """Call ``forward_sorted`` on rows of the CPU, whatever their strides, and bring the result back."""
        scales = None if row_scales is None else self.to_device(row_scales)
        with torch.no_grad():
            output = layer.forward_sorted(self.to_device(rows), num_tokens_per_expert, row_scales=scales)
        result: Tensor = output.cpu()
        return result

    def inputs(
        self, config: MoEConfig, tokens: int, *, seed: int = 0, dtype: torch.dtype | None = None, **routing: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Make seeded (hidden_states, topk_weights, topk_ids)."""
        dtype = self.dtype() if dtype is None else dtype
        hidden_states = make_hidden_states(tokens, config.hidden_size, dtype=dtype, seed=seed)
        return hidden_states, *make_routing(tokens, config.num_experts, config.top_k, seed=seed + 1, **routing)

    def match(self, actual: Tensor, expected: Tensor, context: str = "") -> None:
        """Compare as the kernel declares: by bits, or within its tolerance."""
        assert_matches(self.spec.numerics, actual, expected, context)

    def check(
        self,
        layer: FusedMoE,
        experts: Experts,
        inputs: tuple[Tensor, Tensor, Tensor],
        *,
        expert_map: Tensor | None = None,
        expected: Tensor | None = None,
        context: str = "",
    ) -> Tensor:
        """Compare the layer with the reference at every thread count; return the reference's result."""
        if expected is None:
            expected = remembered_output(layer.config, experts, inputs, expert_map)
        for count in self.threads:
            with threads(count):
                actual = self.forward(layer, *inputs)
            self.match(actual, expected, f"{context}{', ' if context else ''}threads {count}")
        return expected
