"""``load_moe_layers``: a checkpoint's MoE layers, packed and ready, read expert by expert.

Weights are views of the mapped files until the layer copies them into its own storage, so beside that storage
memory holds at most one expert, and only while a float layer is being quantised.
"""

from __future__ import annotations

import logging
import math
import os
import traceback
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import CheckpointError, UnsupportedInputError, WeightLayoutError
from ..layer import FusedMoE
from ..quantize import quantize_weight
from .experts import FLOATS, ExpertParts, LayerPlan, Part
from .faults import Faults, Kind
from .files import TensorEntry
from .packed_cache import PackedCache
from .plan import CheckpointPlan, inspect_checkpoint

logger = logging.getLogger("int8moe.checkpoint")

Progress = Callable[[str, int, int], None]
"""Called after each expert with the layer's key, bytes read so far and bytes of all layers that are loaded."""

_QUANTIZE_ELEMENTS = 1 << 18  # floats that are quantised at a time; their fp32 copies are the extra memory


def load_moe_layers(
    path: str | os.PathLike[str] | CheckpointPlan,
    *,
    kernel: str | None = None,
    layers: Iterable[int] | None = None,
    quantize: bool = False,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
    cache: PackedCache | None = None,
) -> dict[str, FusedMoE]:
    """Load the MoE layers of a checkpoint, packed and ready to be called.

    Args:
        path: directory with config.json and safetensors files, or what inspect_checkpoint made of it.
        kernel: name of a kernel; None = the best, as FusedMoE does.
        layers: numbers of the layers to load; None = all.
        quantize: quantise layers that the checkpoint leaves unquantised while loading them. Otherwise they are
            left out and named in a log line (logger "int8moe.checkpoint").
        device: where the weights live.
        progress: called after each expert with key, bytes read, bytes in total; a layer of the cache counts at once.
        cache: packed layers on disk, which are read instead of the checkpoint where they fit; None = no cache.

    Returns:
        Layers in order, by the module name that transformers gives the experts (``model.layers.0.mlp.experts``).

    Raises:
        CheckpointError: the checkpoint is damaged, incomplete or not supported; one line with all that is wrong.
            No layer is kept then.
        NoKernelError: no kernel can serve the layers.
    """
    plan = path if isinstance(path, CheckpointPlan) else inspect_checkpoint(path)
    chosen = _choose(plan, layers, quantize)
    total, done = sum(layer.nbytes for layer in chosen), 0

    def report(nbytes: int, key: str) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(key, done, total)

    loaded: dict[str, FusedMoE] = {}
    try:
        _load_into(loaded, plan, chosen, kernel, device, report, cache)
    except WeightLayoutError as error:
        _forget(error, loaded)
        raise CheckpointError(f"{plan.path}: {error}") from None
    except BaseException as error:
        _forget(error, loaded)
        raise
    return {layer.key: loaded[layer.key] for layer in chosen}


def load_router(plan: CheckpointPlan, layer: int | str | LayerPlan) -> Tensor:
    """The router's weight of one layer, fp32 ``[num_experts, hidden_size]``; ``plan.routing`` says how to use it.

    Raises:
        CheckpointError: it is not stored, or not as floats of that shape.
    """
    which = plan.layer(layer)
    shape = (which.config.num_experts, which.config.hidden_size)
    if which.router is None:
        raise CheckpointError(f"{plan.path}: the router's weight of {which.key} is not stored")
    if which.router.shape != shape or which.router.dtype not in FLOATS:
        raise CheckpointError(
            f"{which.router.file}: {which.router.name} is {which.router.dtype} {list(which.router.shape)}; a router "
            f"has {', '.join(FLOATS)} {list(shape)}"
        )
    with TensorReader(plan.path) as reader:
        return reader.read(which.router).to(torch.float32, copy=True)


def load_router_biases(plan: CheckpointPlan, layer: int | str | LayerPlan) -> tuple[Tensor | None, Tensor | None]:
    """What is added to a router's logits, and to the scores by which experts are chosen: fp32 ``[num_experts]``.

    Either is None where the checkpoint stores none.

    Raises:
        CheckpointError: one is not stored as floats of that shape.
    """
    which = plan.layer(layer)
    entries = which.router_tensors.bias, which.router_tensors.correction_bias
    for entry in entries:
        if entry is not None and (entry.shape != (which.config.num_experts,) or entry.dtype not in FLOATS):
            raise CheckpointError(
                f"{entry.file}: {entry.name} is {entry.dtype} {list(entry.shape)}; a router's bias has "
                f"{', '.join(FLOATS)} {[which.config.num_experts]}"
            )
    with TensorReader(plan.path) as reader:
        bias, correction = (
            None if entry is None else reader.read(entry).to(torch.float32, copy=True) for entry in entries
        )
    return bias, correction


class TensorReader:
    """Reads tensors as views of mapped files; at most the files in use stay mapped."""

    def __init__(self, directory: Path) -> None:
        self._open: dict[Path, tuple[Any, ExitStack]] = {}

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.keep_only(())

    def keep_only(self, files: Iterable[Path]) -> None:
        """Close all files but these."""
        for file in set(self._open) - set(files):
            self._open.pop(file)[1].close()

    def read(self, entry: TensorEntry) -> Tensor:
        """One tensor, not to be written to."""
        try:
            if entry.file not in self._open:
                stack = ExitStack()
                handle = stack.enter_context(safe_open(str(entry.file), framework="pt", device="cpu"))
                self._open[entry.file] = handle, stack
            tensor: Tensor = self._open[entry.file][0].get_tensor(entry.name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{entry.file}: {entry.name} cannot be read: {error}") from None
        return tensor

    def read_weight(self, part: Part) -> Tensor:
        """The weight of one projection of one expert, ``[out, in]``."""
        weight = self.read(part.weight)
        if part.expert is not None:
            weight = weight[part.expert]
        if part.transposed:
            weight = weight.t()
        return weight if part.rows is None else weight[slice(*part.rows)]

    def read_rows(self, part: Part, entry: TensorEntry) -> Tensor:
        """What another tensor of the part says of its rows: ``[out]``, or ``[1]`` where that is one number."""
        values = self.read(entry)
        if part.expert is not None:
            values = values[part.expert]
        values = values.reshape(-1)
        return values if part.rows is None or values.numel() == 1 else values[slice(*part.rows)]


def _choose(plan: CheckpointPlan, layers: Iterable[int] | None, quantize: bool) -> list[LayerPlan]:
    """The layers to load; says in the log which ones are not, or are quantised."""
    wanted = None if layers is None else {plan.layer(index).index for index in layers}
    named = [layer for layer in plan.layers if wanted is None or layer.index in wanted]
    floats = [layer for layer in named if not layer.quantized]
    if plan.skipped:
        logger.info(
            "%s: outside the model's %d layers, and skipped: %s",
            plan.path, plan.num_hidden_layers, ", ".join(layer.name for layer in plan.skipped),
        )  # fmt: skip
    if floats:
        keys = ", ".join(f"{layer.key} ({layer.dtype})" for layer in floats)
        if quantize:
            logger.info("%s: quantising while loading, as the checkpoint leaves them unquantised: %s", plan.path, keys)
        else:
            logger.warning(
                "%s: left out, as the checkpoint leaves them unquantised (quantize=True quantises them): %s",
                plan.path, keys,
            )  # fmt: skip
    return named if quantize else [layer for layer in named if layer.quantized]


def _check_values(plan: CheckpointPlan, layers: list[LayerPlan], reader: TensorReader) -> None:
    """Look at all scales, zero points and biases, which are small, before the first weight is read."""
    faults = Faults(plan.path)
    for layer in layers:
        reader.keep_only(_files(layer))
        for expert, parts in enumerate(layer.experts):
            for part in parts:
                for entry, what, least in ((part.scale, "scales", 0.0), (part.bias, "biases", -math.inf)):
                    if entry is not None:
                        _check_finite(expert, part, entry, what, least, reader, faults)
                for zero_point in part.zero_points:
                    if bool((reader.read_rows(part, zero_point) != 0).any()):
                        faults.add(
                            Kind.LEFTOVER,
                            f"{zero_point.name} (expert {expert}) is not all zero (asymmetric weights)",
                        )
    faults.raise_if_any()


def _check_finite(
    expert: int, part: Part, entry: TensorEntry, what: str, least: float, reader: TensorReader, faults: Faults
) -> None:
    values = reader.read_rows(part, entry).to(torch.float32)
    low, high = (bound.item() for bound in torch.aminmax(values))
    if low >= least and -math.inf < low and high < math.inf:  # NaN fails all
        return
    bad = values[~(torch.isfinite(values) & (values >= least))]
    faults.add(
        Kind.VALUE,
        f"{entry.name} (expert {expert}, in {entry.file.name}) holds {bad[0].item():g} in {bad.numel()} of "
        f"{values.numel()} places; {what} are finite{' and not negative' if least == 0 else ''}",
    )


def _load_into(
    loaded: dict[str, FusedMoE],
    plan: CheckpointPlan,
    chosen: list[LayerPlan],
    kernel: str | None,
    device: str | torch.device,
    report: Callable[[int, str], None],
    cache: PackedCache | None,
) -> None:
    """Read layers from the cache where they are in it, else from the checkpoint; report takes bytes and key."""
    if cache is not None:
        for layer in chosen:
            module = _empty_layer(layer, kernel, device)
            if cache.load(plan, layer, module):
                loaded[layer.key] = module
                report(layer.nbytes, layer.key)
    rest = [layer for layer in chosen if layer.key not in loaded]
    with TensorReader(plan.path) as reader:
        _check_values(plan, rest, reader)
        for layer in rest:
            module = _empty_layer(layer, kernel, device)
            _load_layer(layer, module, reader, report)
            loaded[layer.key] = module
            if cache is not None:
                cache.store(plan, layer, module)


def _empty_layer(layer: LayerPlan, kernel: str | None, device: str | torch.device) -> FusedMoE:
    module = FusedMoE(layer.config, kernel=kernel, device=device)
    module.layer_name = layer.key
    return module


def _load_layer(layer: LayerPlan, module: FusedMoE, reader: TensorReader, report: Callable[[int, str], None]) -> None:
    """Copy a layer's experts in one by one, and pack it; reports the bytes of each expert on disk."""
    reader.keep_only(_files(layer))
    scratch = None if layer.quantized else _Scratch(layer)
    share, rest = divmod(layer.nbytes, len(layer.experts))
    for expert, parts in enumerate(layer.experts):
        if scratch is None:
            gate, up, down = (_stored(part, reader) for part in parts)
        else:
            gate, up, down = scratch.quantize(expert, parts, reader)
        module.load_expert_weights(
            expert,
            w13_weight=(gate[0], up[0]),
            w13_weight_scale=(gate[1], up[1]),
            w2_weight=down[0],
            w2_weight_scale=down[1],
            **_biases(parts, reader),
        )
        report(share + (rest if expert == 0 else 0), layer.key)
    module.process_weights_after_loading()


def _stored(part: Part, reader: TensorReader) -> tuple[Tensor, Tensor]:
    assert part.scale is not None
    scale = reader.read_rows(part, part.scale)
    return reader.read_weight(part), scale.reshape(()) if scale.numel() == 1 else scale


def _biases(parts: ExpertParts, reader: TensorReader) -> dict[str, Any]:
    """The expert's biases, where it has them."""
    gate, up, down = (None if part.bias is None else reader.read_rows(part, part.bias) for part in parts)
    return {} if down is None else {"w13_bias": (gate, up), "w2_bias": down}


class _Scratch:
    """Room for one quantised expert, used again for the next."""

    def __init__(self, layer: LayerPlan) -> None:
        hidden, width = layer.config.hidden_size, layer.config.intermediate_size
        shapes = ((width, hidden), (width, hidden), (hidden, width))
        self._room = [(torch.empty(shape, dtype=torch.int8), torch.empty(shape[0])) for shape in shapes]

    def quantize(self, expert: int, parts: ExpertParts, reader: TensorReader) -> list[tuple[Tensor, Tensor]]:
        """Quantise one expert a few rows at a time, which leaves the bits as they are: a row has its own scale."""
        for part, (values, scales) in zip(parts, self._room, strict=True):
            source = reader.read_weight(part)
            step = max(1, _QUANTIZE_ELEMENTS // source.shape[1])
            for start in range(0, source.shape[0], step):
                rows = source[start : start + step]
                try:
                    quantized = quantize_weight(rows, name=part.weight.name, expert=expert)
                except UnsupportedInputError:
                    bad = int((~torch.isfinite(rows)).any(dim=1).nonzero()[0])
                    raise CheckpointError(
                        f"{part.weight.file}: {part.weight.name} (expert {expert}) holds a NaN or an Inf in row "
                        f"{start + bad} of this projection; fetch the checkpoint again"
                    ) from None
                values[start : start + step], scales[start : start + step] = quantized
        return self._room


def _files(layer: LayerPlan) -> set[Path]:
    return {entry.file for parts in layer.experts for part in parts for entry in part.entries()}


def _forget(error: BaseException, loaded: dict[str, FusedMoE]) -> None:
    """Let go of all layers: an exception that somebody keeps would keep the frames that hold them."""
    loaded.clear()
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__context__
