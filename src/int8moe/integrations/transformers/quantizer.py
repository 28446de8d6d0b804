"""What transformers calls while it loads and saves a model whose experts int8moe runs.

Before loading, the experts, MLPs and linears that the checkpoint stores in int8 are replaced by empty modules, so that
transformers reads everything else and nothing of them. Afterwards they are filled: experts stream from the files into
the storage of their packed layers, through :func:`int8moe.load_moe_layers`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ...checkpoint import CheckpointPlan, PackedCache, inspect_checkpoint, load_moe_layers
from ...checkpoint.families import FAMILIES
from ...checkpoint.files import TensorEntry, read_tensors
from ...checkpoint.names import experts_place, outside_model
from ...checkpoint.schemes import DESCRIBED, READERS
from ...contracts import MoEConfig
from ...errors import CheckpointError, ConfigError
from ...layer import FusedMoE
from .experts_function import ACTIVATION_MODULES
from .hooks import EXPERTS_IMPLEMENTATION
from .model_structure import as_configured, check_module, is_plain_gated_mlp
from .modules import QuantizedExperts, QuantizedLinear, QuantizedMLP, dequantized_linear
from .saving import model_state, quantization_dict
from .stored_linears import LinearReader, StoredLinear, find_linear, spellings

logger = logging.getLogger("int8moe.integrations.transformers")

EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Fields of a model's config that say that it is a mixture of experts."""

COMPRESSED_TENSORS = "compressed-tensors"
MLP_PARTS = ("gate_proj", "up_proj", "down_proj")


def find_quantizer(config: Any) -> Int8MoEQuantizer | None:
    """The quantizer for a model's config; None when int8moe has no part in loading it.

    Raises:
        ConfigError: a quantised model is to be distributed over several processes.
    """
    text = config.get_text_config()
    stored = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)
    on_load = text._experts_implementation == EXPERTS_IMPLEMENTATION
    if not any(getattr(text, name, None) for name in EXPERT_COUNTS):
        return None
    distributed = getattr(config, "distributed_config", None) is not None
    if stored is not None and not isinstance(stored, dict):
        stored = stored.to_dict()
    plan = _inspect_files(text) if stored is None else None
    if _is_int8(stored) if stored is not None else plan is not None and any(layer.quantized for layer in plan.layers):
        if distributed:
            raise ConfigError("an INT8 checkpoint cannot be distributed: load it in one process, or load the float "
                              f'model with experts_implementation="{EXPERTS_IMPLEMENTATION}"')  # fmt: skip
    elif stored is not None or not on_load or distributed or text.model_type not in FAMILIES:
        return None  # experts_function serves the model, if it is asked for
    return Int8MoEQuantizer(Int8MoEConfig(stored), quantize=on_load, plan=plan)


def _inspect_files(config: Any) -> CheckpointPlan | None:
    """What the files of a model without quantization_config hold: int8 experts are known by their names."""
    directory = Path(getattr(config, "_name_or_path", "") or "")
    if not (directory / "config.json").is_file():
        return None
    try:
        return inspect_checkpoint(directory)
    except CheckpointError:
        # Floats that int8moe does not read are transformers' business; int8 that it does not read is nobody's.
        with contextlib.suppress(CheckpointError):
            if not any(tensor.dtype == "I8" for tensor in read_tensors(directory).values()):
                return None
        raise


def _is_int8(stored: Mapping[str, Any]) -> bool:
    """Whether a quantization_config is about int8 weights and activations."""
    method = stored.get("quant_method")
    if method != COMPRESSED_TENSORS:
        return method in READERS or method in DESCRIBED
    groups = stored.get("config_groups")
    parts = ("weights", "input_activations")
    return isinstance(groups, dict) and any(
        isinstance(group, dict)
        and all(isinstance(group.get(part), dict) for part in parts)
        and all((group[part].get("type", "int"), group[part].get("num_bits", 8)) == ("int", 8) for part in parts)
        for group in groups.values()
    )


class Int8MoEConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """The quantization_config of a loaded model: the dictionary that config.json holds, or will hold."""

    def __init__(self, stored: dict[str, Any] | None) -> None:
        self.quant_method = COMPRESSED_TENSORS
        self.stored = stored

    def to_dict(self) -> dict[str, Any]:
        """As config.json holds it."""
        return dict(self.stored or {"quant_method": self.quant_method})


class Int8MoEQuantizer(HfQuantizer):  # type: ignore[misc]
    """Loads one model.

    Args:
        quantization_config: what config.json says.
        quantize: quantise the experts that the checkpoint stores in floats.
        plan: the checkpoint, where it has been looked at already.
    """

    def __init__(
        self, quantization_config: Int8MoEConfig, *, quantize: bool, plan: CheckpointPlan | None = None
    ) -> None:
        super().__init__(quantization_config, pre_quantized=True)
        self._quantize = quantize
        self._plan = plan
        self._linears: dict[str, StoredLinear] = {}
        self._dtype = torch.float32
        self._ignored_before: Any = None

    @property
    def is_trainable(self) -> bool:
        """Inference only."""
        return False

    @property
    def is_compileable(self) -> bool:
        """The layers are one operator each."""
        return True

    def is_serializable(self) -> bool:
        """As compressed-tensors."""
        return True

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Refuse other devices than the CPU."""
        devices = set((device_map if isinstance(device_map, dict) else {"": device_map}).values())
        if not all(device is None or str(device) == "cpu" for device in devices):
            raise ConfigError(f'device_map={device_map!r}: INT8 experts run on the CPU; leave it out or give "cpu"')

    # ---- before ------------------------------------------------------------------------------------------

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> Any:
        if not checkpoint_files:
            raise CheckpointError("INT8 experts are loaded from files; give from_pretrained a directory, no state_dict")
        directory = Path(checkpoint_files[0]).parent
        if self._plan is None or self._plan.path != directory:
            self._plan = inspect_checkpoint(directory)
        _refuse_other_files(self._plan, checkpoint_files)
        self._plan = as_configured(self._plan, model)
        self._dtype = dtype or model.dtype
        taken = [rf"{_anywhere(key)}\." for key in self._replace_experts(model, self._plan)]
        taken += self._replace_linears(model, self._plan)
        _refuse_orphans(self._plan.tensors, self._linears, model.config.get_text_config().num_hidden_layers)
        # What int8moe reads is neither missing nor unexpected; experts' names are matched after transformers' renaming.
        self._ignored_before = model._keys_to_ignore_on_load_unexpected
        model._keys_to_ignore_on_load_unexpected = {*(self._ignored_before or ()), r"(^|\.)experts\.", *taken}
        return model

    def _replace_experts(self, model: Any, plan: CheckpointPlan) -> list[str]:
        replaced, left = [], []
        modules = dict(model.named_modules())
        for layer in plan.layers:
            name = next((n for n in spellings(layer.key, model.base_model_prefix) if n in modules), None)
            if name is None:
                raise CheckpointError(f"{plan.path}: {type(model).__name__} has no module {layer.key}")
            if layer.quantized or self._quantize:
                check_module(modules[name], layer, plan.path)
                model.set_submodule(name, QuantizedExperts(layer.key, layer.index, layer.config))
                replaced.append(name)
            else:
                left.append(f"{layer.key} ({layer.dtype})")
        if left:
            logger.warning(
                "%s: left unquantised, in the experts of transformers: %s (experts_implementation=%r quantises them)",
                plan.path, ", ".join(left), EXPERTS_IMPLEMENTATION,
            )  # fmt: skip
        return replaced

    def _replace_linears(self, model: Any, plan: CheckpointPlan) -> list[str]:
        found: dict[str, StoredLinear] = {}
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                names = spellings(name, model.base_model_prefix)
                linear = find_linear(names, module, plan.tensors, plan.quantization)
                if linear is not None:
                    found[name] = linear
        for name, module in list(model.named_modules()):
            config = self._mlp_config(name, module, found)
            if config is not None:
                model.set_submodule(name, QuantizedMLP(name, config))
        modules = dict(model.named_modules())
        for name in found:
            if name in modules:
                model.set_submodule(name, QuantizedLinear(name, modules[name]))
        self._linears = found
        return [_anywhere(linear.weight.name) for linear in found.values()]

    def _mlp_config(self, name: str, module: nn.Module, found: Mapping[str, StoredLinear]) -> MoEConfig | None:
        """The layer that stands for a gated MLP of three quantised linears; None for other modules."""
        if not type(module).__name__.endswith("MLP"):
            return None
        linears = [getattr(module, part, None) for part in MLP_PARTS]
        stored = [found.get(f"{name}.{part}") for part in MLP_PARTS]
        if not all(one is not None and not one.weights_alone for one in stored) or any(
            not isinstance(linear, nn.Linear) or linear.bias is not None for linear in linears
        ):
            return None
        activation = ACTIVATION_MODULES.get(type(getattr(module, "act_fn", None)).__name__)
        if activation is None or not is_plain_gated_mlp(module, MLP_PARTS):
            return None
        width, hidden = found[f"{name}.gate_proj"].weight.shape
        return MoEConfig(
            num_experts=1, top_k=1, hidden_size=hidden, intermediate_size=width, activation=activation
        )  # fmt: skip

    # ---- after -------------------------------------------------------------------------------------------

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        assert self._plan is not None
        experts = [module for module in model.modules() if isinstance(module, QuantizedExperts)]
        with torch.device("cpu"), torch.no_grad():
            layers = load_moe_layers(
                self._plan,
                layers=[module.index for module in experts],
                quantize=self._quantize,
                cache=PackedCache(create=False),  # what `int8moe pack` wrote, where it fits
            )
            for module in experts:
                module.fused = layers[module.key]
            self._fill_linears(model)
        config: Int8MoEConfig = self.quantization_config
        config.stored = quantization_dict(model)  # as it would be saved: one scale a channel, whatever the files have
        model.config.quantization_config = config
        model._keys_to_ignore_on_load_unexpected = self._ignored_before
        return model

    def _fill_linears(self, model: Any) -> None:
        with LinearReader() as reader:
            for name, module in list(model.named_modules()):
                if isinstance(module, QuantizedLinear):
                    stored = self._linears[name]
                    if stored.weights_alone:
                        model.set_submodule(name, dequantized_linear(module, *reader.read(stored), dtype=self._dtype))
                    else:
                        module.fill(*reader.read(stored), dtype=self._dtype)
                elif isinstance(module, QuantizedMLP):
                    (gate, gate_scale), (up, up_scale), (down, down_scale) = (
                        reader.read(self._linears[f"{name}.{part}"]) for part in MLP_PARTS
                    )
                    fused = FusedMoE(module.config)
                    fused.layer_name = name
                    fused.load_expert_weights(
                        0,
                        w13_weight=(gate, up),
                        w13_weight_scale=(gate_scale, up_scale),
                        w2_weight=down,
                        w2_weight_scale=down_scale,
                    )
                    fused.process_weights_after_loading()
                    module.fused = fused

    # ---- saving ------------------------------------------------------------------------------------------

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Every tensor of the model under the names of compressed-tensors."""
        assert self._plan is not None
        return model_state(model, self._plan.model_type), {}


def _refuse_other_files(plan: CheckpointPlan, asked_for: list[str]) -> None:
    """Hold the files that int8moe reads against those that from_pretrained was asked for."""
    read = {entry.file.name for entry in plan.tensors.values()}
    asked = {Path(file).name for file in asked_for}
    if read - asked:
        raise ConfigError(
            f"{plan.path}: from_pretrained is to read {', '.join(sorted(asked))}, and INT8 experts are read from "
            f"{', '.join(sorted(read))}; leave out variant and use_safetensors, or give a directory that holds those "
            "weights alone, as model.safetensors"
        )


def _refuse_orphans(tensors: Mapping[str, TensorEntry], linears: Mapping[str, StoredLinear], num_layers: int) -> None:
    """Every int8 tensor and every scale of the model has to have somebody who reads it: floats are made of neither."""
    read = {entry.name for linear in linears.values() for entry in linear.entries()}
    for name, entry in tensors.items():
        if name in read or experts_place(name) is not None or outside_model(name, num_layers):
            continue
        if entry.dtype == "I8" and not name.endswith((".weight_zero_point", ".weight_offset")):
            raise CheckpointError(
                f"{entry.file}: {name} is int8, and the module that it belongs to is no linear or expert; "
                "leave it in floats (the ignore list)"
            )
        weight = tensors.get(name.removesuffix("_scale")) if name.endswith(".weight_scale") else entry
        if weight is None or (weight is not entry and weight.dtype != "I8"):
            raise CheckpointError(
                f"{entry.file}: {name} is stored, but no int8 {name.removesuffix('_scale')}; fetch the checkpoint again"
            )


def _anywhere(name: str) -> str:
    """A pattern for a module's name, with or without the base model's prefix."""
    return rf"(^|\.){name.replace('.', chr(92) + '.')}"
