"""Which safetensors files make up a checkpoint, and what their headers say. Imports no torch.

Only headers are read here, and no pickle ever. Each header is held against the size of its file, so that
a truncated download is found before anything is allocated.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, BinaryIO

from ..errors import CheckpointError
from .faults import Faults, Kind, describe_tensors

logger = logging.getLogger("int8moe.checkpoint")

MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors format."""

ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16,
    "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "C64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_STEM = re.compile(
    r"(model|quant_model_weights?(?:_[a-z0-9_]+)?)"
    r"(?:-[0-9]{1,6}-of-[0-9]{1,6}\.safetensors|\.safetensors(?:\.index\.json)?)"
)
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_OTHER_WEIGHTS = (".gguf", ".h5", ".msgpack", ".onnx", ".npz")


@dataclass(frozen=True)
class TensorEntry:
    """One tensor as a header describes it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: Path


class _Damaged(Exception):
    """A file cannot be read as safetensors; the text says why, as the rest of a sentence about the file."""

    def __init__(self, text: str, tensors: tuple[str, ...] = ()) -> None:
        super().__init__(text)
        self.tensors = tensors


def checkpoint_directory(path: str | os.PathLike[str]) -> Path:
    """Check that a path is a directory that could hold a checkpoint."""
    directory = Path(path)
    if not directory.exists():
        raise CheckpointError(
            f"{directory}: no such directory; give a directory with config.json and safetensors files "
            "(a checkpoint of a hub is downloaded first, for example with `hf download`)"
        )
    if not directory.is_dir():
        hint = "only safetensors files are read, pickles never" if directory.suffix in _PICKLES else ""
        raise CheckpointError(
            f"{directory}: is a file; give the directory that holds config.json and the safetensors files"
            + (f" ({hint})" if hint else "")
        )
    return directory


def open_regular(file: Path) -> BinaryIO:
    """Open a regular file for reading; OSError for all others, as a FIFO would be waited for, and a device be read on.

    The type is looked at before the file is opened, and again after: it may have been exchanged meanwhile.
    """
    _check_regular(file.stat())
    stream = os.fdopen(os.open(file, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_NONBLOCK", 0)), "rb")
    try:
        _check_regular(os.fstat(stream.fileno()))
    except OSError:
        stream.close()
        raise
    return stream


def _check_regular(status: os.stat_result) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file, but a FIFO, a socket or a device")


def read_bytes(file: Path) -> bytes:
    """The whole of a regular file; OSError when there is none."""
    with open_regular(file) as stream:
        return stream.read()


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON object, or raise CheckpointError naming the file."""
    try:
        value = json.loads(read_bytes(file))
    except FileNotFoundError:
        raise CheckpointError(f"{file.parent}: holds no {file.name}; give the directory of a checkpoint") from None
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: is not valid JSON: {error}; fetch the file again") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{file}: holds a JSON {type(value).__name__}, not an object")
    return value


def read_tensors(directory: Path) -> dict[str, TensorEntry]:
    """Every tensor of a checkpoint by name, from the headers of its safetensors files."""
    files, index = _weight_files(directory)
    faults = Faults(directory)
    tensors: dict[str, TensorEntry] = {}
    sound = set()
    for file in files:
        try:
            entries = _read_header(file)
        except _Damaged as damage:
            names = damage.tensors or [name for name, shard in index.items() if shard == _relative(file, directory)]
            lost = f"; lost are {describe_tensors(names)}" if names else ""
            faults.add(Kind.DAMAGED, f"{file.name} {damage}{lost}")
            continue
        sound.add(_relative(file, directory))
        for entry in entries:
            other = tensors.setdefault(entry.name, entry)
            if other is not entry:
                faults.add(Kind.INDEX, f"{entry.name} is stored in both {other.file.name} and {file.name}")
    for name, shard in index.items():
        found = tensors.get(name)
        if shard in sound and (found is None or _relative(found.file, directory) != shard):
            where = "in no file" if found is None else f"in {found.file.name}"
            faults.add(Kind.INDEX, f"{name} should be in {shard}, and is {where}")
    faults.raise_if_any()
    return tensors


def _weight_files(directory: Path) -> tuple[list[Path], dict[str, str]]:
    """The files to read, and the index (tensor name -> file) where there is one."""
    stem = _file_stem(directory)
    index_file, single = directory / f"{stem}.safetensors.index.json", directory / f"{stem}.safetensors"
    if index_file.exists():
        index = _read_index(index_file)
        # As transformers does: one whole file goes before the index of other files.
        if not single.exists() or single.name in index.values():
            return [directory / shard for shard in sorted(set(index.values()))], index
        logger.warning(
            "%s: %s is read, and %s, which names other files, is not", directory, single.name, index_file.name
        )
    if single.exists() or single.is_symlink():
        return [single], {}
    pattern = re.compile(re.escape(stem) + r"-([0-9]{1,6})-of-([0-9]{1,6})\.safetensors")
    shards = {file.name: match for file in directory.iterdir() if (match := pattern.fullmatch(file.name))}
    counts = {int(match[2]) for match in shards.values()}
    if len(counts) == 1:
        count, width = counts.pop(), len(next(iter(shards.values()))[1])
        if count <= 100_000:
            names = (f"{stem}-{i:0{width}d}-of-{count:0{width}d}.safetensors" for i in range(1, count + 1))
            return [directory / name for name in names], {}
    raise CheckpointError(f"{directory}: {_no_weights(directory)}")


def _file_stem(directory: Path) -> str:
    """What the names of the weight files begin with: "model", or the one name that ModelSlim gave them."""
    stems = sorted({match[1] for file in directory.iterdir() if (match := _STEM.fullmatch(file.name))})
    if "model" in stems or not stems:
        return "model"
    if len(stems) > 1:
        raise CheckpointError(f"{directory}: holds weights called {' and '.join(stems)}; move one of them away")
    return stems[0]


def _no_weights(directory: Path) -> str:
    """Say what a directory without safetensors of the usual names holds instead."""
    names = sorted(file.name for file in directory.iterdir() if file.is_file())
    for name in names:
        if name.endswith((*_PICKLES, *_OTHER_WEIGHTS)):
            return (
                f"holds {name} and no {_SINGLE}; only safetensors files are read, pickles never: "
                "save the model again with save_pretrained(..., safe_serialization=True)"
            )
    for name in names:
        if name.endswith(".safetensors"):
            return f"holds {name}, but neither {_SINGLE} nor {_INDEX}; rename it, or fetch the index"
    return f"holds no safetensors file ({_SINGLE}, or shards and {_INDEX}); fetch the weights too"


def _read_index(file: Path) -> dict[str, str]:
    weight_map = read_json(file).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{file}: has no weight_map (tensor name -> file name); fetch the file again")
    if shards := sorted({str(shard) for shard in weight_map.values() if str(shard).endswith(_PICKLES)}):
        raise CheckpointError(f"{file}: names {shards[0]}; only safetensors files are read, pickles never")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or not _is_inside(shard):
            raise CheckpointError(
                f"{file}: puts {name} into {shard!r}; allowed are names of safetensors files below {file.parent}"
            )
    return {name: PurePosixPath(shard).as_posix() for name, shard in weight_map.items()}


def _relative(file: Path, directory: Path) -> str:
    return file.relative_to(directory).as_posix()


def _is_inside(shard: str) -> bool:
    posix, windows = PurePosixPath(shard), PureWindowsPath(shard)
    plain = not (posix.is_absolute() or windows.drive or windows.root or "\0" in shard)
    return plain and ".." not in windows.parts and posix.suffix == ".safetensors"


def _read_header(file: Path) -> list[TensorEntry]:
    """The tensors of one file; raises _Damaged for whatever the file's size contradicts."""
    try:
        with open_regular(file) as stream:
            size = os.fstat(stream.fileno()).st_size
            prefix = stream.read(8)
            if prefix == b"version ":
                raise _Damaged("is a git-lfs pointer, not the weights (run `git lfs pull`)")
            if len(prefix) < 8:
                raise _Damaged(f"is truncated: {size} bytes")
            length = int.from_bytes(prefix, "little")
            if length > MAX_HEADER_BYTES:
                raise _Damaged(f"has an absurd header length, {length} bytes (the format allows {MAX_HEADER_BYTES})")
            if length > size - 8:
                raise _Damaged(f"is truncated: its header takes {8 + length} bytes, the file has {size}")
            raw = stream.read(length)
    except FileNotFoundError:
        raise _Damaged("is missing") from None
    except OSError as error:
        raise _Damaged(f"cannot be read: {error.strerror}") from None
    try:
        header = json.loads(raw.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _Damaged(f"has a header that is not valid JSON: {error}") from None
    if not isinstance(header, dict):
        raise _Damaged("has a header that is not a JSON object")
    header.pop("__metadata__", None)
    return _entries(file, header, size - 8 - length)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} stands there twice")
    return fields


def _entries(file: Path, header: dict[str, Any], data_bytes: int) -> list[TensorEntry]:
    entries, spans = [], []
    for name, fields in header.items():
        try:
            dtype, shape, (start, stop) = fields["dtype"], fields["shape"], fields["data_offsets"]
        except (KeyError, TypeError, ValueError):
            raise _Damaged(f"has a header without dtype, shape and data_offsets for {name}") from None
        numbers = [*shape, start, stop] if type(shape) is list else [None]
        if any(type(number) is not int or number < 0 for number in numbers) or start > stop or type(dtype) is not str:
            raise _Damaged(f"has a header with an impossible shape, dtype or offset for {name}")
        bits = ITEM_BITS.get(dtype)
        if bits is not None and math.prod(shape) * bits != 8 * (stop - start):
            raise _Damaged(f"has a header that gives {name} {stop - start} bytes, which is not {dtype} {shape}")
        entries.append(TensorEntry(name, dtype, tuple(shape), stop - start, file))
        spans.append((start, stop, name))
    end = 0
    for start, stop, name in sorted(spans):
        if start != end:
            how = "overlaps another tensor" if start < end else "lies after a hole"
            raise _Damaged(f"has a header in which {name} {how}")
        end = stop
    if end > data_bytes:
        lost = tuple(name for _, stop, name in sorted(spans) if stop > data_bytes)
        raise _Damaged(f"is truncated: its tensors take {end} bytes, the file has {data_bytes} of them", lost)
    if end < data_bytes:
        raise _Damaged(f"has {data_bytes - end} bytes after its last tensor")
    return entries
