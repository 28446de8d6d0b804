"""ExpertWeights: the tensors of one layer, their storage, and the tag that says how they are packed.

States: EMPTY -> LOADED (canonical tensors) -> PACKED (the kernel's). The storage of the weights is allocated
once, at the size that the kernel asks for, so that packing can run in place.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn

from .contracts import MoEConfig, WeightLayout
from .errors import Int8MoEError, WeightLayoutError
from .loading import ParameterValue, Validated, validate
from .parameters import EMPTY, LOADED, PACKED, PARAMETERS, SCALES_AND_BIASES, WEIGHTS
from .saved_state import load_state
from .storage import AuxTensors, Generation, allocate_bytes, numbered

if TYPE_CHECKING:
    from typing_extensions import Self

# One lock for all layers: packing runs on every core already. A forked child gets a new one: the thread that
# held this one may not be there.
_pack_lock = threading.RLock()


def _new_lock() -> None:
    global _pack_lock
    _pack_lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)


class PackingKernel(Protocol):
    """What :meth:`ExpertWeights.pack` needs of a bound kernel."""

    name: str
    process_weights_after_loading: Callable[..., Any]
    restore_weights: Callable[..., Any] | None


class ExpertWeights(nn.Module):
    """What a kernel's hooks get as ``layer``: tensors under the names that engines use, and their layout.

    Attributes:
        config: the layer's MoEConfig. E below is ``config.local_experts``.
        w13_weight: int8 ``[E, 2I, H]`` (``[E, I, H]`` without a gate) while canonical; the kernel's own when packed.
        w13_weight_scale: fp32 ``[E, 2I]``; stays as it is through packing.
        w13_bias: fp32 ``[E, 2I]`` or None.
        w2_weight: int8 ``[E, H, I]`` while canonical.
        w2_weight_scale: fp32 ``[E, H]``.
        w2_bias: fp32 ``[E, H]`` or None.
        expert_map: int32 ``[num_experts]`` global to local id or -1, or None.
        aux: named tensors that the kernel adds.
        prepared: anything that the kernel wants to find again at the next call (a native descriptor); never
            saved or copied, and cleared when the weights are reset, restored or moved.
        layer_name: how errors call the layer.
    """

    w13_weight: Tensor
    w13_weight_scale: Tensor
    w13_bias: Tensor | None
    w2_weight: Tensor
    w2_weight_scale: Tensor
    w2_bias: Tensor | None
    expert_map: Tensor | None
    aux: AuxTensors

    def __init__(
        self, config: MoEConfig, *, expert_map: Tensor | None = None, device: str | torch.device = "cpu"
    ) -> None:
        super().__init__()
        self.config = config
        self.layer_name = type(self).__name__
        self.prepared: object = None
        self.state = EMPTY
        self._generation = Generation()
        self._layout: WeightLayout | None = None
        self._tag = ""
        self._loaded: set[int] = set()
        self._expert_stride: dict[str, int] = {}
        self._home = numbered(device)
        for name in PARAMETERS:
            self.register_buffer(name, None)
        # Beside the weights: a kernel that fetched it at a call would wait for the device.
        self.register_buffer("expert_map", None if expert_map is None else expert_map.to(self._home), persistent=False)
        self.aux = AuxTensors()

    # ---- layout ------------------------------------------------------------------------------------------

    @property
    def layout(self) -> WeightLayout | None:
        """The tag of the packed weights; None until they are packed."""
        return self._layout

    @layout.setter
    def layout(self, value: WeightLayout | None) -> None:
        self._layout = value
        self._tag = "" if value is None else value.tag

    @property
    def weight_shapes(self) -> dict[str, tuple[int, int, int]]:
        """Canonical shapes of the two weights."""
        c = self.config
        return {
            "w13_weight": (c.local_experts, c.w13_rows, c.hidden_size),
            "w2_weight": (c.local_experts, c.hidden_size, c.intermediate_size),
        }

    def expert_bytes(self, name: str) -> Tensor:
        """The storage of a weight as uint8 ``[E, P]``, P being at least what packed_expert_nbytes asked for.

        In the canonical state expert e's int8 matrix starts at the first byte of row e.
        """
        experts = self.config.local_experts
        stride = self._expert_stride[name]
        weight: Tensor = getattr(self, name)
        return weight.view(torch.uint8).as_strided((experts, stride), (stride, 1))

    def canonical_view(self, name: str) -> Tensor:
        """The same storage as int8 ``[E, N, K]``, one expert every P bytes."""
        experts, rows, columns = self.weight_shapes[name]
        stride = self._expert_stride[name]
        return self.expert_bytes(name).view(torch.int8).as_strided((experts, rows, columns), (stride, columns, 1))

    # ---- load --------------------------------------------------------------------------------------------

    def allocate(self, packed_expert_nbytes: tuple[int, int] | None = None) -> None:
        """Make the storage of an empty layer, rows of at least ``packed_expert_nbytes`` (w13, w2) an expert."""
        with torch.inference_mode(False):  # an inference tensor could not be loaded again outside
            self._allocate(packed_expert_nbytes or (0, 0))

    def _allocate(self, packed_expert_nbytes: tuple[int, int]) -> None:
        for name, wanted in zip(WEIGHTS, packed_expert_nbytes, strict=True):
            experts, rows, columns = self.weight_shapes[name]
            stride = max(rows * columns, int(wanted))
            self._expert_stride[name] = stride
            setattr(self, name, allocate_bytes(experts * stride, self._home))
            setattr(self, name, self.canonical_view(name))
        c = self.config
        widths = {"w13": c.w13_rows, "w2": c.hidden_size}
        for name in SCALES_AND_BIASES:
            if name.endswith("scale") or c.has_bias:
                shape = c.local_experts, widths[name.partition("_")[0]]
                setattr(self, name, torch.zeros(shape, dtype=torch.float32, device=self._home))

    def _make_room(self) -> None:
        """Allocate what the kernel will want; the base class has no kernel."""
        self.allocate()

    def load(self, *, gate_up_layout: str = "stacked", **values: ParameterValue | None) -> None:
        """Copy all experts in; see :meth:`int8moe.FusedMoE.load_weights`."""
        self._refuse_packed("load_weights")
        self._copy_in(validate(self, values, gate_up_layout, expert=None), slice(None))
        self._loaded = set(range(self.config.local_experts))
        self.state = LOADED

    def load_one(self, local: int, *, gate_up_layout: str = "stacked", **values: ParameterValue | None) -> None:
        """Copy one expert, given by its local index, in."""
        self._refuse_packed("load_expert_weights")
        self._copy_in(validate(self, values, gate_up_layout, expert=local), slice(local, local + 1))
        self._loaded.add(local)
        if len(self._loaded) == self.config.local_experts:
            self.state = LOADED

    def _copy_in(self, validated: Validated, experts: slice) -> None:
        try:
            with torch.no_grad():
                for name, rows, source in validated:
                    target: Tensor = getattr(self, name)
                    target[experts, rows].copy_(source)
        except BaseException:
            self.clear()  # no mixture of old and new weights
            raise

    def _refuse_packed(self, call: str) -> None:
        if self.state == PACKED:
            raise WeightLayoutError(
                f"{self.layer_name}: {call} on weights that are packed as {self._tag}; "
                "call reload_weights(...), or reset() first"
            )
        if not self._expert_stride:
            raise WeightLayoutError(f"{self.layer_name}: {call} before the storage is allocated")

    # ---- pack --------------------------------------------------------------------------------------------

    def pack(self, kernel: PackingKernel, expected_layout: str | None = None) -> WeightLayout:
        """Let the kernel pack the loaded weights; a second call is a no-op.

        Raises:
            WeightLayoutError: experts are missing, or the kernel failed (then the layer is EMPTY).
        """
        with _pack_lock:
            if self.state == PACKED:
                assert self.layout is not None
                return self.layout
            if self.config.local_experts == 0 and not self._expert_stride:
                self._make_room()  # a rank that holds no expert has nothing to load
            missing = sorted(set(range(self.config.local_experts)) - self._loaded)
            if missing or not self._expert_stride:
                which = "no weights are loaded" if not self._loaded else f"experts {_some(missing)} are not loaded"
                raise WeightLayoutError(
                    f"{self.layer_name}: process_weights_after_loading for kernel {kernel.name}: {which}; "
                    "call load_weights(...) or load_expert_weights(...) for each of them first"
                )
            try:
                with torch.inference_mode(False), torch.no_grad():
                    layout: WeightLayout = kernel.process_weights_after_loading(self)
                self._check_layout(kernel, layout, expected_layout)
            except BaseException as error:
                self.clear()
                if not isinstance(error, Exception):
                    raise
                text = str(error) if isinstance(error, Int8MoEError) else f"{type(error).__name__}: {error}"
                raise WeightLayoutError(
                    f"{self.layer_name}: kernel {kernel.name} failed while packing: {text}. "
                    "The layer is empty now: load again"
                ) from error
            if not layout.is_canonical:
                self._bytes_moved("packed")
            self.layout = layout
            self._publish()
            self.state = PACKED
            return layout

    def _publish(self) -> None:
        """Called when the weights are packed, before the state says so; the base class has no calls to serve."""

    def _retire(self) -> None:
        """Called before the packed weights change or go."""

    def _bytes_moved(self, what: str) -> None:
        """Tell state_dicts that share this storage that their tags no longer describe it."""
        self._generation.ended_by = what
        self._generation = Generation()

    def _check_layout(self, kernel: PackingKernel, layout: object, expected: str | None) -> None:
        if not isinstance(layout, WeightLayout):
            raise WeightLayoutError(
                f"process_weights_after_loading returned {layout!r}; return the WeightLayout that it produced "
                "(WeightLayout.canonical() when it packs nothing)"
            )
        namespace = kernel.name.partition(".")[0]
        if not layout.is_canonical and layout.namespace != namespace:
            raise WeightLayoutError(f"its layout {layout.tag} is outside its namespace {namespace!r}")
        if expected is not None and layout.name != expected:
            raise WeightLayoutError(
                f"it declares the layout {expected!r} and produced {layout.name!r}: give KernelSpec.layout and the "
                "WeightLayout that packing returns one name"
            )
        if any(not isinstance(getattr(self, name), Tensor) for name in WEIGHTS):
            raise WeightLayoutError("it set a weight to None; leave a tensor there, an empty one if need be")
        if layout.is_canonical and not self._is_canonical():
            raise WeightLayoutError("it says that the weights are canonical, but changed their shape or dtype")

    def _is_canonical(self) -> bool:
        return all(
            isinstance(tensor := getattr(self, name), Tensor)
            and tensor.dtype == torch.int8
            and tuple(tensor.shape) == shape
            for name, shape in self.weight_shapes.items()
        )

    def unpack(self, kernel: PackingKernel) -> None:
        """Let the kernel turn packed weights back into the canonical tensors."""
        with _pack_lock:
            if self.state != PACKED:
                return
            assert self.layout is not None
            if not self.layout.is_canonical:
                if kernel.restore_weights is None:
                    raise WeightLayoutError(
                        f"{self.layer_name}: kernel {kernel.name} cannot restore its layout {self._tag} "
                        "(it has no restore_weights hook); load the weights again"
                    )
                self._retire()
                self.state = LOADED
                self._bytes_moved("restored")
                try:
                    with torch.inference_mode(False), torch.no_grad():
                        kernel.restore_weights(self)
                    if not self._is_canonical():
                        raise WeightLayoutError("the tensors are not the canonical ones")
                except BaseException as error:
                    self.clear()
                    if not isinstance(error, Exception):
                        raise
                    raise WeightLayoutError(
                        f"{self.layer_name}: kernel {kernel.name} failed while restoring: {error}. "
                        "The layer is empty now: load again"
                    ) from error
                self.aux.clear()
            self._retire()
            self.layout = None
            self.prepared = None
            self.state = LOADED

    def clear(self) -> None:
        """Back to EMPTY; the tensors are released, except to calls that are under way."""
        self._retire()
        self.state = EMPTY
        self._bytes_moved("cleared")
        for name in PARAMETERS:
            setattr(self, name, None)
        self.aux.clear()
        self.prepared = None
        self.layout = None
        self._loaded = set()
        self._expert_stride = {}

    def adopt_packed(
        self, parameters: dict[str, Tensor | None], aux: dict[str, Tensor], layout: WeightLayout | None
    ) -> None:
        """Stand for tensors that are packed already, without a copy: how the operator sees a layer."""
        self._buffers.update(parameters)
        for name, tensor in aux.items():
            self.aux[name] = tensor
        for name in WEIGHTS:
            self._expert_stride[name] = _expert_stride(getattr(self, name), self.weight_shapes[name])
        self.layout = layout
        self.state = PACKED

    # ---- moves, copies, files ----------------------------------------------------------------------------

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        if self.state == PACKED:
            target = fn(torch.empty(0, dtype=torch.uint8, device=self._home)).device
            if target.type != self._home.type:
                raise WeightLayoutError(
                    f"{self.layer_name}: weights packed as {self._tag} cannot move from {self._home} to {target}; "
                    f"call restore_weights() first, or make a layer with device={str(target)!r}"
                )

        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        result = cast("Self", super()._apply(keep_dtype, recurse))  # type: ignore[no-untyped-call]
        self.prepared = None
        if isinstance(self.w13_weight_scale, Tensor):
            self._home = self.w13_weight_scale.device
        for name, shape in self.weight_shapes.items():
            weight: Tensor | None = getattr(self, name)
            if weight is not None:  # a copy to another device may drop the gap between experts
                self._expert_stride[name] = _expert_stride(weight, shape)
        if self.state == PACKED:
            self._publish()
        return result

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "prepared": None}

    def get_extra_state(self) -> dict[str, Any]:
        """What the tensors alone do not say: state, layout tag, expert strides."""
        return {
            "state": self.state,
            "layout": None if self.layout is None else self.layout.model_dump(),
            "expert_stride": dict(self._expert_stride),
            "generation": self._generation,
        }

    def set_extra_state(self, state: Any) -> None:
        """Handled in _load_from_state_dict, together with the tensors."""

    def _accept_layout(self, layout: WeightLayout) -> None:
        """Refuse a packed state that this layer's kernel does not read; the base class has no kernel."""

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        load_state(self, state_dict, prefix, missing_keys)


def _expert_stride(weight: Tensor, shape: tuple[int, int, int]) -> int:
    """Bytes from one expert to the next; a size-1 dimension may report any stride."""
    if tuple(weight.shape) == shape:
        return max(weight.stride(0), shape[1] * shape[2])
    return weight.numel() * weight.element_size() // max(shape[0], 1)


def _some(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:8]))
    return shown if len(numbers) <= 8 else f"{shown} and {len(numbers) - 8} more"
