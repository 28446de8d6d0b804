"""``int8moe new-plugin`` as a command: its one line for each fault, its document, and nothing half-written."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from int8moe.errors import ConfigError
from int8moe.host import feature_words
from int8moe.scaffold import PluginNames, check_isa, check_namespace, write, write_plugin

from .conftest import Command

CHECKOUT = Path(__file__).resolve().parents[2]


def test_what_comes_next_is_printed(int8moe: Command, tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    done = int8moe("new-plugin", "acme", "--isa", "any", "--output", str(folder))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-4:] == [
        "next:",
        f"  python -m pip install -e '{folder}'",
        "  int8moe list-kernels --check",
        "  int8moe verify acme.torch --quick",
    ]
    assert (folder / "src" / "int8moe_acme" / "experts.py").is_file()
    assert os.listdir(tmp_path) == ["with space"]  # noqa: PTH208


def test_json(int8moe: Command, tmp_path: Path) -> None:
    document = int8moe.json("new-plugin", "my_cpu", "--isa", "any", "--native", "--output", str(tmp_path / "new"))
    assert document["schema"] == 1
    assert document["path"] == str(tmp_path / "new")
    assert (document["distribution"], document["kernel"]) == ("int8moe-my-cpu", "my_cpu.scalar")
    on_disk = {
        path.relative_to(tmp_path / "new").as_posix() for path in (tmp_path / "new").rglob("*") if path.is_file()
    }
    assert set(document["files"]) == on_disk
    assert {"csrc/tier_scalar.cpp", "include/int8moe/driver.h", "CMakeLists.txt"} <= on_disk


def test_the_folder_is_called_as_the_namespace(int8moe: Command) -> None:
    document = int8moe.json("new-plugin", "my_other_cpu", "--isa", "any")
    assert document["path"] == str(int8moe.folder / "my-other-cpu")
    assert document["next"][0] == "python -m pip install -e ./my-other-cpu"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["Acme"], ["'Acme' is no namespace", "lower-case letters", "acme or my_cpu"]),
        (["9acme"], ["'9acme' is no namespace"]),
        (["acme_"], ["'acme_' is no namespace"]),
        (["my-cpu"], ["'my-cpu' is no namespace"]),
        (["acmé"], ["is no namespace"]),
        (["a" * 41], ["at most 40"]),
        (["../acme"], ["is no namespace"]),
        (["reference"], ["'reference' is reserved", "choose another"]),
        (["int8moe"], ["'int8moe' is reserved"]),
        (["x86_vnni"], ["'x86_vnni' is reserved", "int8moe-x86-vnni"]),
        (["acme", "--isa", "warp drive"], ["'--isa'", "'warp drive' is no feature", "any"]),
        (["acme", "--isa", "ani"], ["'--isa'", "no feature 'ani'", "--foreign"]),
        (["acme", "--output", "absent/acme"], ["'--output'", "there is no folder", "make it first"]),
        (["acme", "--output", __file__ + "/acme"], ["'--output'", f"{__file__} is no folder", "name another place"]),
        (["acme", "--output", "a" * 300], ["'--output'", "cannot be made: File name too long", "name another folder"]),
        (["acme", "--isa", "any", "--isa", "mul"], ["'--isa'", "given 2 times (any, mul)", "one feature", "plugin.py"]),
        (["acme", "--isa"], ["--isa", "requires an argument"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_fault_is_one_line(int8moe: Command, arguments: list[str], words: list[str]) -> None:
    options = [] if "--isa" in arguments else ["--isa", "any"]
    text = int8moe.error("new-plugin", *arguments, *options, status=2)
    for word in words:
        assert word in text


@pytest.mark.parametrize("folder", sorted(path.parent.name for path in CHECKOUT.glob("plugins/*/pyproject.toml")))
def test_the_namespaces_of_this_project_are_reserved(folder: str) -> None:
    with pytest.raises(ConfigError, match=f"'{folder}' is reserved"):
        check_namespace(folder)


def test_an_installed_plugin_s_name_is_taken(int8moe: Command, plugins, tmp_path: Path) -> None:
    plugins.add_good("acme")
    arguments = ("new-plugin", "acme", "--isa", "any", "--output", str(tmp_path / "new"))
    text = int8moe.error(*arguments, site=plugins.folder, status=2)
    assert "'acme' is taken by the installed plugin acme-kernels 1.0" in text
    (plugins.folder / "int8moe_bolt").mkdir()
    (plugins.folder / "int8moe_bolt" / "__init__.py").touch()
    text = int8moe.error("new-plugin", "bolt", "--isa", "any", site=plugins.folder, status=2)
    assert "a package int8moe_bolt is installed already" in text
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("kind", ["folder", "file", "dangling link"])
def test_what_exists_is_left_alone(int8moe: Command, tmp_path: Path, kind: str) -> None:
    target = tmp_path / "here"
    {
        "folder": target.mkdir,
        "file": lambda: target.write_text("mine"),
        "dangling link": lambda: target.symlink_to(tmp_path / "nowhere"),
    }[kind]()
    text = int8moe.error("new-plugin", "acme", "--isa", "any", "--output", str(target), status=2)
    assert f"{target} exists already" in text
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_a_place_that_cannot_be_written_is_one_line(int8moe: Command) -> None:
    text = int8moe.error("new-plugin", "acme", "--isa", "any", "--output", "/proc/acme", status=2)
    assert "cannot write to /proc" in text
    assert "name another place" in text


def test_isa_is_a_word_of_this_machine() -> None:
    known = ("avx2", "fma", "asimd")
    for word in (*known, "any"):
        assert check_isa(word, known=known) == word
    with pytest.raises(ConfigError, match=r"no feature 'avx22': did you mean avx2\?"):
        check_isa("avx22", known=known)
    with pytest.raises(ConfigError, match=r"no feature 'AVX2': did you mean avx2\?"):
        check_isa("AVX2", known=known)
    assert check_isa("vxe", foreign=True, known=known) == "vxe"
    with pytest.raises(ConfigError, match="no feature of a CPU"):
        check_isa("", foreign=True, known=known)
    for word in feature_words():
        assert check_isa(word) == word


@pytest.mark.parametrize("word", ["3dnow", "avx10.1", "avx2"])
def test_every_word_makes_a_name_of_a_kernel(word: str) -> None:
    names = PluginNames(check_namespace("acme"), check_isa(word, foreign=True), native=True)
    assert names.kernel == f"acme.{word.replace('.', '_')}"


def test_a_failure_on_the_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C when half of the files are there."""
    before = Path.write_bytes
    count = 0

    def write_bytes(path: Path, data: bytes) -> int:
        nonlocal count
        count += 1
        if count > 5:
            raise KeyboardInterrupt
        return before(path, data)

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    with pytest.raises(KeyboardInterrupt):
        write_plugin(PluginNames("acme", "any", native=True), tmp_path / "acme")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_appears_meanwhile_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, render = tmp_path / "acme", write.render

    def late(names: PluginNames) -> dict[Path, bytes]:
        target.mkdir()
        return render(names)

    monkeypatch.setattr(write, "render", late)
    with pytest.raises(ConfigError, match="appeared meanwhile"):
        write_plugin(PluginNames("acme", "any", native=False), target)
    assert list(tmp_path.iterdir()) == [target]
    assert list(target.iterdir()) == []


def test_the_folder_has_the_usual_permissions(tmp_path: Path) -> None:
    (tmp_path / "usual").mkdir()
    write_plugin(PluginNames("acme", "any", native=False), tmp_path / "acme")
    assert (tmp_path / "acme").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_torch_is_not_imported(int8moe: Command, isolated, tmp_path: Path) -> None:
    done = isolated(f"""
        import json, sys
        from int8moe.scaffold import PluginNames, check_isa, check_namespace, write_plugin
        check_namespace("acme"), check_isa("any")
        write_plugin(PluginNames("acme", "any", True), __import__("pathlib").Path({str(tmp_path / "new")!r}))
        print(json.dumps(sorted({{"torch", "numpy"}} & set(sys.modules))))
    """)
    assert json.loads(done.stdout) == [], done.stderr
