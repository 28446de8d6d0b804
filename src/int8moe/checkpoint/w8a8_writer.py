"""``quantize_checkpoint``: from an unquantised MoE checkpoint to compressed-tensors W8A8, tensor by tensor.

The experts are quantised (Q of docs/numerics.md, one fp32 scale a row); every other tensor is copied as it is.
Shards are written one by one into ``DST.partial``, which is renamed at the very end: what is called DST is whole.
A run that was killed is continued by the next one from the last whole shard.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple

import filelock
import torch

from ..errors import CheckpointError, UnsupportedInputError
from ..quantize import quantize_weight
from .experts import Part
from .families import FAMILIES, PROJ
from .files import TensorEntry, read_json
from .load import TensorReader
from .names import with_and_without_prefix
from .plan import CheckpointPlan, inspect_checkpoint
from .quantizable import new_directory, refuse_quantized
from .safetensors_file import PARTIAL, TensorSpec, make_header, tensor_bytes, written_whole
from .stamps import Stamps, content_digest
from .w8a8_config import quantization_config

__all__ = ["QuantizedCheckpoint", "quantize_checkpoint"]

MAX_SHARD_BYTES = 4 << 30

_RECORD = "quantize.json"
_LOCK = "quantize.lock"
_INDEX = "model.safetensors.index.json"
_WEIGHT_FILES = (
    ".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".npz",
)  # fmt: skip
_QUANTIZE_ELEMENTS = 1 << 18  # floats that are quantised at a time; their fp32 copies are the extra memory
_SPARE_BYTES = 1 << 20  # for config.json, the index and the tokenizer

Progress = Callable[[str, int, int], None]
"""Called after each tensor with the shard's name, bytes of the source that are done, and all of them."""


class QuantizedCheckpoint(NamedTuple):
    """What was written.

    Attributes:
        path: the new checkpoint.
        layers: keys of the layers whose experts were quantised.
        num_experts: experts in all of them.
        source_bytes: of the source's tensors.
        nbytes: of the new safetensors files.
        shards: their names.
        resumed: those that an earlier run had written.
        copied: other files that were copied.
    """

    path: Path
    layers: tuple[str, ...]
    num_experts: int
    source_bytes: int
    nbytes: int
    shards: tuple[str, ...]
    resumed: tuple[str, ...]
    copied: tuple[str, ...]


class _Item(NamedTuple):
    """One projection of one expert to be quantised; or, without ``part``, a tensor to be copied.

    The bias of an expert's own projection is such a tensor; that of a fused one is written with its rows.
    """

    entry: TensorEntry
    nbytes: int
    module: str = ""
    expert: int = 0
    part: Part | None = None
    shape: tuple[int, int] = (0, 0)

    def specs(self) -> tuple[TensorSpec, ...]:
        if self.part is None:
            return (TensorSpec(self.entry.name, self.entry.dtype, self.entry.shape),)
        rows, bias = self.shape[0], self.fused_bias
        return (
            TensorSpec(f"{self.module}.weight", "I8", self.shape),
            TensorSpec(f"{self.module}.weight_scale", "F32", (rows, 1)),
            *(() if bias is None else (TensorSpec(f"{self.module}.bias", bias.dtype, (rows,)),)),
        )

    @property
    def fused_bias(self) -> TensorEntry | None:
        """The biases of all experts, of which this projection has some."""
        return None if self.part is None or self.part.expert is None else self.part.bias


class _Shard(NamedTuple):
    name: str
    items: tuple[_Item, ...]
    specs: tuple[TensorSpec, ...]
    header: bytes

    @property
    def nbytes(self) -> int:
        return len(self.header) + sum(spec.nbytes for spec in self.specs)

    def is_written(self, folder: Path) -> bool:
        file = folder / self.name
        if not file.is_file() or file.stat().st_size != self.nbytes:
            return False
        with file.open("rb") as stream:
            return stream.read(len(self.header)) == self.header


def quantize_checkpoint(
    source: Path | str,
    destination: Path | str,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress | None = None,
) -> QuantizedCheckpoint:
    """Quantise the experts of a checkpoint to int8, and copy the rest.

    Args:
        source: directory of an unquantised MoE checkpoint (bfloat16, float16 or float32).
        destination: directory to be made; ``destination.partial`` beside it may be there from a run that was killed.
        max_shard_bytes: a new file is begun before one would grow beyond that.
        progress: called after each tensor.

    Raises:
        CheckpointError: the source is damaged, not supported, without MoE layers or quantised already; the
            destination exists, has no room, or is being written by another process.
    """
    target = new_directory(destination)
    partial = target.with_name(f"{target.name}{PARTIAL}")
    plan = inspect_checkpoint(source)
    refuse_quantized(plan)
    tensors = plan.tensors
    items = _items(plan, tensors)
    shards = _shards(items, max_shard_bytes)
    record = _record(plan, tensors, max_shard_bytes)
    _check_room(target, sum(shard.nbytes for shard in shards if not shard.is_written(partial)))
    try:
        with _claimed(partial, record):
            resumed = tuple(shard.name for shard in shards if shard.is_written(partial))
            _write_shards(plan, partial, shards, resumed, progress)
            copied = _copy_files(plan.path, partial)
            _write_configuration(plan, partial, items, shards)
            if _record(plan, tensors, max_shard_bytes) != record:
                raise CheckpointError(f"{plan.path}: was changed while it was read; remove {partial} and begin again")
        for name in (_RECORD, _LOCK):
            (partial / name).unlink(missing_ok=True)
        partial.rename(target)
    except OSError as error:
        raise CheckpointError(
            f"{partial}: cannot be written: {error.strerror}; mend that and run the same again: it goes on from there"
        ) from None
    return QuantizedCheckpoint(
        path=target,
        layers=tuple(layer.key for layer in plan.layers),
        num_experts=sum(layer.config.num_experts for layer in plan.layers),
        source_bytes=sum(entry.nbytes for entry in tensors.values()),
        nbytes=sum(shard.nbytes for shard in shards),
        shards=tuple(shard.name for shard in shards),
        resumed=resumed,
        copied=copied,
    )


def _items(plan: CheckpointPlan, tensors: Mapping[str, TensorEntry]) -> list[_Item]:
    """What becomes of every tensor of the source, file by file."""
    family = FAMILIES.get(plan.model_type)
    naming = next((naming for naming in family.namings if not naming.fused), None) if family is not None else None
    quantized: dict[str, list[_Item]] = {}
    for layer in plan.layers:
        hidden, width = layer.config.hidden_size, layer.config.intermediate_size
        for expert, parts in enumerate(layer.experts):
            for role, part in zip(("gate", "up", "down"), (parts.gate, parts.up, parts.down), strict=True):
                shape = (hidden, width) if role == "down" else (width, hidden)
                fused = part.expert is not None
                if not fused:
                    module = part.weight.name.removesuffix(".weight")
                elif naming is not None:
                    module = naming.linear(layer.index, expert, role)
                    if not part.weight.name.startswith(module.partition(".")[0]):  # a base model saved alone
                        module = with_and_without_prefix(module)[-1]
                else:
                    module = f"{layer.key}.{expert}.{PROJ[role]}"
                share = part.weight.nbytes * shape[0] * shape[1] // math.prod(part.weight.shape)
                item = _Item(part.weight, share, module, expert, part, shape)
                quantized.setdefault(part.weight.name, []).append(item)
    split = {item.fused_bias.name for items in quantized.values() for item in items if item.fused_bias is not None}
    order = sorted(
        (entry for entry in tensors.values() if entry.name not in split), key=lambda entry: str(entry.file)
    )  # stable: as stored within a file
    return [item for entry in order for item in quantized.get(entry.name, [_Item(entry, entry.nbytes)])]


def _shards(items: Sequence[_Item], max_bytes: int) -> list[_Shard]:
    groups: list[list[_Item]] = [[]]
    size = 0
    for item in items:
        nbytes = sum(spec.nbytes for spec in item.specs())
        if groups[-1] and size + nbytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += nbytes
    shards = []
    for number, group in enumerate(groups, start=1):
        # Wide types first, as the format's own library does it: so each tensor is aligned to its type.
        specs = [spec for item in group for spec in item.specs()]
        specs.sort(key=lambda spec: -spec.item_bits)
        name = "model.safetensors" if len(groups) == 1 else f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        shards.append(_Shard(name, tuple(group), tuple(specs), make_header(specs, {"format": "pt"})))
    return shards


def _record(plan: CheckpointPlan, tensors: Mapping[str, TensorEntry], max_shard_bytes: int) -> dict[str, Any]:
    """What a run that continues another has to agree with it on."""
    stamps = Stamps()
    files = sorted({entry.file for entry in tensors.values()})
    return {
        "source": str(plan.path.resolve()),
        "files": {
            "config.json": content_digest(plan.path / "config.json"),
            **{file.name: stamps.of(file) for file in files},
        },
        "max_shard_bytes": max_shard_bytes,
    }


@contextmanager
def _claimed(partial: Path, record: dict[str, Any]) -> Iterator[None]:
    """Hold the folder that is written to: no other process does, and what is in it belongs to this run."""
    partial.mkdir(exist_ok=True)
    try:
        with filelock.FileLock(partial / _LOCK, timeout=0):
            earlier = partial / _RECORD
            if earlier.exists():
                if read_json(earlier) != record:
                    raise CheckpointError(
                        f"{partial}: was begun from another source, or with other options; remove it, or choose "
                        "another destination"
                    )
            elif any(path.name != _LOCK for path in partial.iterdir()):
                raise CheckpointError(f"{partial}: holds other files; remove it, or choose another destination")
            else:
                with written_whole(earlier) as stream:
                    stream.write(json.dumps(record, indent=2).encode())
            for left in partial.glob(f".*{PARTIAL}"):
                left.unlink()
            yield
    except filelock.Timeout:
        raise CheckpointError(f"{partial}: is being written by another process; wait for it") from None


def _check_room(target: Path, nbytes: int) -> None:
    free = shutil.disk_usage(target.absolute().parent).free
    if nbytes + _SPARE_BYTES > free:
        raise CheckpointError(
            f"{target}: {nbytes + _SPARE_BYTES:,} bytes are still to be written, and {free:,} are free there; "
            "make room, or choose another destination"
        )


def _write_shards(
    plan: CheckpointPlan, partial: Path, shards: Sequence[_Shard], resumed: Sequence[str], progress: Progress | None
) -> None:
    total, done = sum(item.nbytes for shard in shards for item in shard.items), 0
    with TensorReader(plan.path) as reader:
        for shard in shards:
            if shard.name in resumed:
                done += sum(item.nbytes for item in shard.items)
                if progress is not None:
                    progress(shard.name, done, total)
                continue
            reader.keep_only({item.entry.file for item in shard.items})
            offsets, at = {}, len(shard.header)
            for spec in shard.specs:
                offsets[spec.name] = at
                at += spec.nbytes
            with written_whole(partial / shard.name) as stream:
                stream.write(shard.header)
                for item in shard.items:
                    _write_item(item, offsets, reader, stream)
                    done += item.nbytes
                    if progress is not None:
                        progress(shard.name, done, total)


def _write_item(item: _Item, offsets: dict[str, int], reader: TensorReader, stream: IO[bytes]) -> None:
    first, *rest = item.specs()
    stream.seek(offsets[first.name])
    if item.part is None:
        stream.write(tensor_bytes(reader.read(item.entry).contiguous()))
        return
    source = reader.read_weight(item.part)
    scales = torch.empty(item.shape[0], dtype=torch.float32, device="cpu")
    step = max(1, _QUANTIZE_ELEMENTS // item.shape[1])
    for start in range(0, item.shape[0], step):  # a row has its own scale: that changes no bit
        rows = source[start : start + step]
        try:
            values, scales[start : start + step] = quantize_weight(rows, name=item.entry.name, expert=item.expert)
        except UnsupportedInputError:
            bad = int((~torch.isfinite(rows)).any(dim=1).nonzero()[0])
            raise CheckpointError(
                f"{item.entry.file}: {item.entry.name} (expert {item.expert}) holds a NaN or an Inf in row "
                f"{start + bad} of this projection; fetch the checkpoint again"
            ) from None
        stream.write(tensor_bytes(values.contiguous()))
    stream.seek(offsets[rest[0].name])
    stream.write(tensor_bytes(scales))
    if item.fused_bias is not None:
        stream.seek(offsets[rest[1].name])
        bias = reader.read_rows(item.part, item.fused_bias).contiguous()
        stream.write(tensor_bytes(bias))


def _copy_files(source: Path, partial: Path) -> tuple[str, ...]:
    """Copy tokenizer, generation settings and whatever else lies beside the weights; no folders, no weights."""
    copied = []
    for file in sorted(source.iterdir()):
        if file.is_file() and file.name != "config.json" and not file.name.endswith(_WEIGHT_FILES):
            with file.open("rb") as stream, written_whole(partial / file.name) as copy:
                shutil.copyfileobj(stream, copy)
            copied.append(file.name)
    return tuple(copied)


def _write_configuration(
    plan: CheckpointPlan,
    partial: Path,
    items: Sequence[_Item],
    shards: Sequence[_Shard],
) -> None:
    left = [item.entry for item in items if item.part is None]
    config = read_json(plan.path / "config.json")
    config["quantization_config"] = quantization_config(left, [layer.name for layer in plan.skipped])
    with written_whole(partial / "config.json") as stream:
        stream.write(json.dumps(config, indent=2).encode() + b"\n")
    if len(shards) > 1:
        index = {
            "metadata": {"total_size": sum(spec.nbytes for shard in shards for spec in shard.specs)},
            "weight_map": dict(sorted((spec.name, shard.name) for shard in shards for spec in shard.specs)),
        }
        with written_whole(partial / _INDEX) as stream:
            stream.write(json.dumps(index, indent=2).encode() + b"\n")
