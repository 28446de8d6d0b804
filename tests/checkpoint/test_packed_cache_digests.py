"""A packed file is digested when it is read for the first time, and again after every change."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cached_layers import assert_same, files, load

from int8moe.checkpoint import checked_files, packed_file
from int8moe.checkpoint.checked_files import NOTES


@pytest.fixture
def digested(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Sizes of what reading has digested; files count as settled at once."""
    sizes: list[int] = []
    real = packed_file.xxhash.xxh3_64

    class Counting:
        def __init__(self) -> None:
            self._digest = real()

        def update(self, part: memoryview) -> None:
            sizes.append(len(part))
            self._digest.update(part)

        def hexdigest(self) -> str:
            return self._digest.hexdigest()

    monkeypatch.setattr(packed_file.xxhash, "xxh3_64", Counting)
    monkeypatch.setattr(checked_files, "_SETTLED_NS", -1)
    return sizes


def read(checkpoint: Path, folder: Path, digested: list[int]) -> tuple[bool, list[str]]:
    """Whether reading digested something, and what the cache did."""
    digested.clear()
    _, states = load(checkpoint, folder, kernel="reference.torch", create=False)
    return bool(digested), states


def test_the_first_read_digests_and_the_second_does_not(checkpoint: Path, folder: Path, digested: list[int]) -> None:
    cold, _ = load(checkpoint, folder, kernel="reference.torch")
    assert read(checkpoint, folder, digested) == (True, ["read", "read"])
    assert read(checkpoint, folder, digested) == (False, ["read", "read"])
    again, _ = load(checkpoint, folder, kernel="reference.torch", create=False)
    assert_same(again, cold)


def flip_keeping_mtime(file: Path) -> None:
    status = file.stat()
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    with file.open("r+b") as stream:
        stream.write(data)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def copy_over(file: Path) -> None:
    other = file.with_name("other")
    other.write_bytes(file.read_bytes())
    other.replace(file)


@pytest.mark.parametrize(
    ("change", "states"),
    [(flip_keeping_mtime, ["written", "read"]), (copy_over, ["read", "read"]), (os.utime, ["read", "read"])],
)
def test_a_file_that_was_changed_is_digested_again(
    checkpoint: Path, folder: Path, digested: list[int], change: Callable[[Path], None], states: list[str]
) -> None:
    load(checkpoint, folder, kernel="reference.torch")
    for _ in range(2):
        read(checkpoint, folder, digested)
    change(files(folder)[0])
    assert read(checkpoint, folder, digested) == (True, states)


@pytest.mark.parametrize("notes", ["", "[]", "[" * 100_000, '{"a": 1}', None])
def test_broken_notes_are_no_notes(checkpoint: Path, folder: Path, digested: list[int], notes: str | None) -> None:
    load(checkpoint, folder, kernel="reference.torch")
    place = files(folder)[0].parent / NOTES
    if notes is None:
        place.mkdir()
    else:
        place.write_text(notes)
    assert read(checkpoint, folder, digested) == (True, ["read", "read"])


def test_a_young_file_is_not_noted(checkpoint: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more write within a tick of the clock would leave its ctime as it is."""
    load(checkpoint, folder, kernel="reference.torch")
    monkeypatch.setattr(checked_files, "_SETTLED_NS", 3_600_000_000_000)
    load(checkpoint, folder, kernel="reference.torch", create=False)
    assert not (files(folder)[0].parent / NOTES).exists()


def test_notes_of_files_that_are_gone_are_dropped(checkpoint: Path, folder: Path, digested: list[int]) -> None:
    load(checkpoint, folder, kernel="reference.torch")
    place = files(folder)[0].parent / NOTES
    place.write_text(json.dumps({"gone.safetensors": [1, 2, 3, 4, 5]}))
    read(checkpoint, folder, digested)
    assert sorted(json.loads(place.read_text())) == sorted(file.name for file in files(folder))
