"""FusedMoE: the routed experts of one MoE layer, from selection to forward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import ops
from .binding import BoundKernel, bind, choose
from .call_inputs import (
    ID_DTYPES,
    WEIGHT_DTYPES,
    check_inputs,
    check_rows,
    checked_out,
    must_use_operator,
    same_storage,
)
from .contracts import MoEConfig, SelectionReport, WeightLayout
from .errors import ConfigError, Int8MoEError, UnsupportedInputError, WeightLayoutError
from .loading import ParameterValue, validate, with_expert_map
from .parameters import EMPTY, PACKED, PARAMETERS
from .weights import ExpertWeights

__all__ = ["FusedMoE"]


class FusedMoE(ExpertWeights):
    """The routed experts of one layer, run by the best kernel that is installed. Inference only.

    The order is: make, load, ``process_weights_after_loading()`` (the selected kernel packs), call.

    Args:
        config: what the layer computes.
        kernel: name of a kernel, which is then used or an error is raised; None = INT8MOE_KERNEL, else the best.
        expert_map: ``[num_experts]`` global to local expert id, -1 for experts that live elsewhere; None = all here.
        device: where the weights live.

    Attributes:
        kernel: the bound kernel; ``kernel.name`` is "<namespace>.<kernel>".
        selection: SelectionReport: the choice, and every rejected candidate with its reason.

    Raises:
        NoKernelError: no kernel can serve the config, with every reason.
    """

    _packed: ExpertWeights | None

    def __init__(
        self,
        config: MoEConfig,
        *,
        kernel: str | None = None,
        expert_map: Tensor | Sequence[int] | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        if expert_map is not None:
            config, expert_map = with_expert_map(config, expert_map)
        elif config.has_expert_map:
            raise ConfigError("the config has has_expert_map=True: give FusedMoE the expert_map")
        bound, report = choose(config, kernel=kernel, device=str(device))
        super().__init__(config, expert_map=expert_map, device=device)
        self.kernel: BoundKernel = bound
        self.selection: SelectionReport = report
        self._op_arguments: tuple[Any, ...] = ()
        self._retire()
        names = (config.hidden_dtype,) if config.hidden_dtype is not None else bound.spec.dtypes
        self._dtypes = frozenset(getattr(torch, name) for name in names)

    # ---- weights -----------------------------------------------------------------------------------------

    @property
    def weight_layout(self) -> WeightLayout | None:
        """How the weights are packed; None before process_weights_after_loading()."""
        return self.layout

    def _make_room(self) -> None:
        size = self.kernel.packed_expert_nbytes
        self.allocate(None if size is None else size(self.config))

    def load_weights(
        self,
        *,
        w13_weight: ParameterValue,
        w13_weight_scale: ParameterValue,
        w2_weight: ParameterValue,
        w2_weight_scale: ParameterValue,
        w13_bias: ParameterValue | None = None,
        w2_bias: ParameterValue | None = None,
        gate_up_layout: str = "stacked",
    ) -> None:
        """Copy the weights of all (local) experts in; the caller's tensors are neither kept nor written.

        Args:
            w13_weight: int8 ``[E, 2I, H]``, gate rows first (``[E, I, H]`` without a gate), or a pair (gate, up)
                of ``[E, I, H]``.
            w13_weight_scale: ``[E, 2I]``, a trailing 1 accepted; or one a tensor: ``[E]``, ``[E, 1]``, ``[E, 2]``
                (gate, up), a number. fp32, bf16 or fp16; kept as fp32. Or a pair (gate, up).
            w2_weight: int8 ``[E, H, I]``.
            w2_weight_scale: ``[E, H]``, a trailing 1 accepted; or ``[E]``, ``[E, 1]``, a number.
            w13_bias: ``[E, 2I]`` where the config has a bias.
            w2_bias: ``[E, H]`` where the config has a bias.
            gate_up_layout: "stacked", or "interleaved" when w13's rows are g0, u0, g1, u1, ...

        Raises:
            WeightLayoutError: wrong shape or dtype, a scale that is NaN, infinite or negative (the text names the
                parameter and the experts), or the layer is packed already.
        """
        if self.state == EMPTY and not self._expert_stride:
            self._make_room()
        self.load(
            w13_weight=w13_weight,
            w13_weight_scale=w13_weight_scale,
            w2_weight=w2_weight,
            w2_weight_scale=w2_weight_scale,
            w13_bias=w13_bias,
            w2_bias=w2_bias,
            gate_up_layout=gate_up_layout,
        )

    def load_expert_weights(
        self,
        expert: int,
        *,
        w13_weight: ParameterValue,
        w13_weight_scale: ParameterValue,
        w2_weight: ParameterValue,
        w2_weight_scale: ParameterValue,
        w13_bias: ParameterValue | None = None,
        w2_bias: ParameterValue | None = None,
        gate_up_layout: str = "stacked",
    ) -> bool:
        """Copy one expert in, given by its global id; shapes are those of load_weights without E.

        Returns:
            Whether it was stored; False for an expert that the expert_map places elsewhere.

        Raises:
            WeightLayoutError: as load_weights.
        """
        if not 0 <= expert < self.config.num_experts:
            raise WeightLayoutError(
                f"{self.layer_name}: expert {expert} does not exist; ids are 0 to {self.config.num_experts - 1}"
            )
        local = expert if self.expert_map is None else int(self.expert_map[expert])
        if local < 0:
            return False
        if self.state == EMPTY and not self._expert_stride:
            self._make_room()
        self.load_one(
            local,
            w13_weight=w13_weight,
            w13_weight_scale=w13_weight_scale,
            w2_weight=w2_weight,
            w2_weight_scale=w2_weight_scale,
            w13_bias=w13_bias,
            w2_bias=w2_bias,
            gate_up_layout=gate_up_layout,
        )
        return True

    def process_weights_after_loading(self) -> None:
        """Let the selected kernel pack the weights; a second call is a no-op.

        Raises:
            WeightLayoutError: experts are not loaded, or packing failed (the layer is empty then: load again).
        """
        self.pack(self.kernel, expected_layout=self.kernel.spec.layout)

    def _publish(self) -> None:
        # What a call reads, in one object that is never changed: a reset or reload in another thread swaps it, and
        # calls under way keep theirs. Not through nn.Module, which would make it a submodule.
        snapshot = ExpertWeights(self.config, expert_map=self.expert_map, device=self._home)
        snapshot.adopt_packed(
            {name: getattr(self, name) for name in PARAMETERS}, {name: self.aux[name] for name in self.aux}, self.layout
        )
        self._op_arguments = ops.op_arguments(self, self.kernel.name)
        object.__setattr__(self, "_packed", snapshot)

    def _retire(self) -> None:
        object.__setattr__(self, "_packed", None)

    def reload_weights(self, *, gate_up_layout: str = "stacked", **parameters: ParameterValue | None) -> None:
        """Replace all weights, whatever the state, and pack; the result is that of a fresh layer, bit for bit.

        Args:
            gate_up_layout: as load_weights.
            **parameters: those of load_weights.

        Raises:
            WeightLayoutError: as load_weights; then the old weights still stand.
        """
        validate(self, parameters, gate_up_layout, expert=None)
        self.reset()
        self._make_room()
        self.load(gate_up_layout=gate_up_layout, **parameters)
        self.process_weights_after_loading()

    def restore_weights(self) -> None:
        """Turn packed weights back into the canonical tensors (state LOADED).

        Raises:
            WeightLayoutError: the kernel has no restore_weights hook.
        """
        self.unpack(self.kernel)

    def reset(self) -> None:
        """Release all weights, and what the kernel kept for its calls (state EMPTY)."""
        self.clear()
        if self.kernel.release_scratch is not None:
            self.kernel.release_scratch()

    def _accept_layout(self, layout: WeightLayout) -> None:
        mine, spec = self.kernel.layout, self.kernel.spec
        if mine is None:  # not self-tested, so that only the declaration is known
            namespace = "int8moe" if spec.layout == "canonical" else spec.namespace
            mine = layout.model_copy(update={"namespace": namespace, "name": spec.layout})
        if mine.tag != layout.tag:
            raise WeightLayoutError(
                f"{self.layer_name}: the state is packed as {layout.tag}, kernel {self.kernel.name} reads {mine.tag}; "
                "load canonical weights (restore_weights() before state_dict()), or name the kernel that packed it"
            )

    # ---- forward -----------------------------------------------------------------------------------------

    def forward(
        self, hidden_states: Tensor, topk_weights: Tensor, topk_ids: Tensor, *, out: Tensor | None = None
    ) -> Tensor:
        """Run the routed experts.

        Args:
            hidden_states: ``[M, H]`` or ``[..., H]``, bfloat16, float16 or float32, any strides.
            topk_weights: ``[M, k]`` (or ``[..., k]``), any float dtype.
            topk_ids: ``[M, k]`` (or ``[..., k]``), int32 or int64, global expert ids. A slot whose id is negative,
                too large or mapped to -1 contributes nothing.
            out: where to write; same shape, dtype and device as hidden_states. None = a new tensor.

        Returns:
            ``out``, or a new tensor like hidden_states. Inputs are never written, and no input is returned.

        Raises:
            WeightLayoutError: the weights were never packed, or by another kernel.
            UnsupportedInputError: a shape, dtype or device that the layer does not take.
        """
        if self.state != PACKED:
            raise self._not_packed()
        hidden_size, top_k = self.config.hidden_size, self.config.top_k
        if not (
            isinstance(hidden_states, Tensor) and isinstance(topk_weights, Tensor) and isinstance(topk_ids, Tensor)
        ):
            check_inputs(self, hidden_states, topk_weights, topk_ids)
        shape = hidden_states.shape
        if not (
            len(shape) == 2
            and shape[1] == hidden_size
            and topk_ids.shape == topk_weights.shape == (shape[0], top_k)
            and hidden_states.dtype in self._dtypes
            and topk_ids.dtype in ID_DTYPES
            and topk_weights.dtype in WEIGHT_DTYPES
            and hidden_states.layout == topk_ids.layout == topk_weights.layout == torch.strided
            and hidden_states.device == topk_ids.device == topk_weights.device == self._home
        ):
            check_inputs(self, hidden_states, topk_weights, topk_ids)
        if len(shape) != 2:
            hidden_states = hidden_states.reshape(-1, hidden_size)
            topk_weights = topk_weights.reshape(-1, top_k)
            topk_ids = topk_ids.reshape(-1, top_k)
        if must_use_operator(hidden_states, topk_weights):
            result = ops.fused_experts(
                hidden_states, topk_weights, topk_ids,
                self.w13_weight, self.w13_weight_scale, self.w13_bias,
                self.w2_weight, self.w2_weight_scale, self.w2_bias, self.expert_map,
                [self.aux[name] for name in self.aux], list(self.aux), *self._op_arguments,
            )  # fmt: skip
            result = result.view(shape)
            return result if out is None else checked_out(self, out, shape, hidden_states).copy_(result)
        if hidden_states.is_neg() or topk_weights.is_neg():  # a lazy negation that pointers do not show
            hidden_states, topk_weights = hidden_states.resolve_neg(), topk_weights.resolve_neg()
        packed = self._packed
        if packed is None:
            raise self._not_packed()
        if self._tag != packed._tag and self.state == PACKED:
            raise WeightLayoutError(
                f"{self.layer_name}: the weights are tagged {self._tag or 'not packed'}, kernel {self.kernel.name} "
                f"reads {packed._tag}; reset() and load again"
            )
        # An out is written directly only where no input can be clobbered before it is read.
        direct = (
            out is not None
            and checked_out(self, out, shape, hidden_states).is_contiguous()
            and not any(same_storage(out, given) for given in (hidden_states, topk_weights, topk_ids))
        )
        if out is not None and direct:
            self.kernel.apply(packed, hidden_states, topk_weights, topk_ids, out.view(hidden_states.shape))
            return out
        # empty_like is a third of the price of empty, but keeps the strides of its argument.
        target = (
            torch.empty_like(hidden_states)
            if hidden_states.is_contiguous()
            else torch.empty(hidden_states.shape, dtype=hidden_states.dtype, device=self._home)
        )
        self.kernel.apply(packed, hidden_states, topk_weights, topk_ids, target)
        target = target if len(shape) == 2 else target.view(shape)
        return target if out is None else out.copy_(target)

    def forward_sorted(
        self,
        rows: Tensor,
        num_tokens_per_expert: Tensor | Sequence[int],
        *,
        row_scales: Tensor | None = None,
    ) -> Tensor:
        """Run experts on rows that are sorted by local expert already, without router weights.

        Args:
            rows: ``[T, H]`` bfloat16, float16 or float32; or int8 with row_scales.
            num_tokens_per_expert: ``[local experts]``, how many of the rows each expert takes, in order.
            row_scales: fp32 ``[T]`` for int8 rows.

        Returns:
            fp32 ``[T, H]``: step 7 of docs/numerics.md for each row.

        Raises:
            Int8MoEError: the kernel has no apply_rows hook.
            WeightLayoutError: the weights were never packed.
            UnsupportedInputError: wrong shapes, dtypes or devices, or counts that do not add up to T.
        """
        packed = self._packed
        if packed is None:
            raise self._not_packed()
        if self.kernel.apply_rows is None:
            raise Int8MoEError(
                f"kernel {self.kernel.name} has no apply_rows hook, which forward_sorted needs; "
                "call the layer with topk_ids, or name another kernel"
            )
        check_rows(self, rows, row_scales)
        if torch.is_grad_enabled() and rows.requires_grad:
            raise Int8MoEError(ops.INFERENCE_ONLY)
        counts = torch.as_tensor(num_tokens_per_expert).detach().to("cpu", torch.int64).contiguous()
        local = self.config.local_experts
        if counts.shape != (local,) or bool((counts < 0).any()) or int(counts.sum()) != rows.shape[0]:
            raise UnsupportedInputError(
                f"{self.layer_name}: num_tokens_per_expert is {counts.tolist()}; give {local} counts that add up to "
                f"{rows.shape[0]}, the number of rows"
            )
        out = torch.empty(rows.shape, dtype=torch.float32, device=rows.device)
        self.kernel.apply_rows(packed, rows.resolve_neg(), row_scales, counts, out)
        return out

    def _not_packed(self) -> WeightLayoutError:
        todo = "call process_weights_after_loading() first"
        if self.state == EMPTY:
            todo = "call load_weights(...) and process_weights_after_loading() first"
        return WeightLayoutError(
            f"{self.layer_name} (kernel {self.kernel.name}) is {self.state}, its weights were never packed; {todo}"
        )

    # ---- copies ------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "kernel": self.kernel.name, "_packed": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "kernel": bind(state["kernel"])})  # type: ignore[no-untyped-call]
        if self.state == PACKED:
            assert self.layout is not None
            self._accept_layout(self.layout)
            self._publish()

    def extra_repr(self) -> str:
        """Sizes, kernel and state, for print(model)."""
        c = self.config
        return (
            f"num_experts={c.num_experts}, top_k={c.top_k}, hidden_size={c.hidden_size}, "
            f"intermediate_size={c.intermediate_size}, activation={c.activation}, kernel={self.kernel.name}, "
            f"{self.state}"
        )
