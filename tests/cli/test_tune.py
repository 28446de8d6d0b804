"""``int8moe tune``: a kernel's own measurement, kept where the kernel finds it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from int8moe.tuned_files import tuned_folder

from .conftest import EXPERTS_IN_TROUBLE, Command

TUNED_EXPERTS = (
    EXPERTS_IN_TROUBLE.format(apply="pass", pack="pass")
    + """
    @hookimpl
    def tune(self, config, tokens, report):
        report(f"measured {config.num_experts} experts, {list(tokens)} tokens")
        return {%s: '{"best": 1}'}
"""
)
SMOKE = ("tune", "--kernel", "acme.fast", "--shape", "smoke", "--tokens", "16,1-2")


def add_kernel(plugins: Any, file_name: str) -> Path:
    plugins.add_good()
    (plugins.folder / "acme_plugin_experts.py").write_text(TUNED_EXPERTS % repr(file_name))
    folder: Path = plugins.folder
    return folder


def test_what_the_kernel_measured_is_kept(int8moe: Command, plugins: Any, tmp_path: Path) -> None:
    site = add_kernel(plugins, "here.json")
    done = int8moe(*SMOKE, site=site, INT8MOE_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    written = tmp_path / "tuned" / "acme" / "here.json"
    assert done.stdout == f"tuned: {written}\n"
    assert "measured 16 experts, [1, 2, 16] tokens" in done.stderr
    assert json.loads(written.read_text()) == {"best": 1}
    assert [path.name for path in written.parent.iterdir()] == ["here.json"], "nothing half-written is left"
    document = int8moe.json(*SMOKE, site=site, INT8MOE_CACHE_DIR=str(tmp_path))
    assert document == {
        "schema": 1, "kernel": "acme.fast", "shape": "smoke", "tokens": [1, 2, 16], "files": [str(written)],
    }  # fmt: skip


def test_the_kernel_finds_it_in_the_same_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("INT8MOE_CACHE_DIR", str(tmp_path))
    assert tuned_folder("acme") == tmp_path / "tuned" / "acme"


@pytest.mark.parametrize("name", ["../escape.json", "", "a/b.json"])
def test_a_kernel_writes_nowhere_else(int8moe: Command, plugins: Any, tmp_path: Path, name: str) -> None:
    site = add_kernel(plugins, name)
    done = int8moe(*SMOKE, site=site, INT8MOE_CACHE_DIR=str(tmp_path))
    assert done.returncode == 1
    assert "it has to return plain names" in done.stderr
    assert not (tmp_path / "tuned").exists()
    assert not (tmp_path / "escape.json").exists()


@pytest.mark.parametrize("where", ["a file", "below a file"])
def test_a_folder_that_cannot_be_written_is_refused_before_the_measuring(
    int8moe: Command, plugins: Any, tmp_path: Path, where: str
) -> None:
    site = add_kernel(plugins, "here.json")
    (tmp_path / "file").write_text("not a folder")
    folder = tmp_path / "file" if where == "a file" else tmp_path / "file" / "cache"
    done = int8moe(*SMOKE, site=site, INT8MOE_CACHE_DIR=str(folder))
    assert done.returncode == 1
    assert "measured" not in done.stderr
    assert f"{folder}/tuned/acme cannot be written: Not a directory; name another folder with" in done.stderr
    assert "INT8MOE_CACHE_DIR" in done.stderr


def test_kernel_without_anything_to_tune(int8moe: Command) -> None:
    assert "has no tune hook" in int8moe.error("tune", "--kernel", "reference.torch")


def test_kernel_for_another_machine(int8moe: Command, plugins: Any) -> None:
    plugins.add_good("zvx", isa='(("zvx9",),)')
    text = int8moe.error("tune", "--kernel", "zvx.fast", site=plugins.folder)
    assert "cannot be tuned on this machine: needs zvx9" in text


def test_unknown_names(int8moe: Command) -> None:
    assert "did you mean reference.torch?" in int8moe.error("tune", "--kernel", "reference.troch")
    assert "did you mean mixtral-8x7b?" in int8moe.error(
        "tune", "--kernel", "reference.torch", "--shape", "mixtral", status=2
    )
