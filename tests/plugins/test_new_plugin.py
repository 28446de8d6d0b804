"""``int8moe new-plugin``: what it writes builds, is found, conforms and is clean, as it stands."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from virtual_environment import Environment

from int8moe import get_include
from int8moe.host import feature_words
from int8moe.scaffold import ANY_ISA, PluginNames, write_plugin

WORD = min(feature_words(), default=ANY_ISA)
"""A feature of this machine's CPU."""

FOREIGN = "feature_of_the_moon_as_long_as_it_may_be"


class Variant(NamedTuple):
    """One way to call new-plugin."""

    namespace: str
    isa: str
    native: bool

    @property
    def names(self) -> PluginNames:
        return PluginNames(*self)


VARIANTS = [
    Variant("comet", ANY_ISA, False),
    Variant("comet_cpu", WORD, False),
    Variant("bolt", ANY_ISA, True),
    Variant("bolt_cpu", WORD, True),
    Variant("a_namespace_as_long_as_one_of_them_may_b", FOREIGN, False),
    Variant("a_namespace_as_long_as_one_of_them_may_c", FOREIGN, True),
]


def identify(variant: Variant) -> str:
    return f"{variant.isa}-{'native' if variant.native else 'torch'}"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    return Environment(tmp_path_factory.mktemp("environment") / "venv")


def install(environment: Environment, folder: Path) -> None:
    environment.pip("install", "--no-deps", "--no-build-isolation", str(folder))


def rows(environment: Environment, *arguments: str) -> dict[str, Any]:
    return {row["name"]: row for row in environment.int8moe("list-kernels", *arguments)["kernels"]}


@pytest.mark.slow
@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.isa != FOREIGN], ids=identify)
def test_it_is_built_listed_and_verified(environment: Environment, tmp_path: Path, variant: Variant) -> None:
    """Groups that tell much; the documentation's commands below run them all for one variant."""
    names = variant.names
    options = ["--native"] if variant.native else []
    made = environment.int8moe(
        "new-plugin", variant.namespace, "--isa", variant.isa, "--output", str(tmp_path / "new"), *options
    )
    assert made["kernel"] == names.kernel
    install(environment, tmp_path / "new")
    row = rows(environment, "--check")[names.kernel]
    assert (row["available"], row["reason"], row["check"]) == (True, "", "ok")
    assert row["distribution"] == names.distribution == made["distribution"]
    assert row["layout"] == names.layout
    assert row["numerics"] == "bitwise"
    assert row["isa"] == ([] if variant.isa == ANY_ISA else [[variant.isa]])
    groups = ["declaration"]  # a word of the ISA changes names alone
    if variant.isa == ANY_ISA:
        groups += ["packing", "integers", "refusals"]
        if not variant.native:  # whose hooks are the core's
            groups += ["bits", "operator"]
    result = environment.int8moe("verify", names.kernel, "--quick", *(f"--group={group}" for group in groups))
    assert result["passed"]
    assert all(group["passed"] > 0 for group in result["groups"])


@pytest.mark.slow
@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.isa == FOREIGN], ids=identify)
def test_for_another_machine_it_is_listed_with_the_reason(
    environment: Environment, tmp_path: Path, variant: Variant
) -> None:
    options = ["--foreign", *(["--native"] if variant.native else [])]
    environment.int8moe("new-plugin", variant.namespace, "--isa", FOREIGN, "--output", str(tmp_path / "new"), *options)
    install(environment, tmp_path / "new")
    row = rows(environment)[variant.names.kernel]
    assert not row["available"]
    assert FOREIGN in row["reason"]


@pytest.mark.slow
def test_a_library_of_other_headers_or_none_is_a_reason(environment: Environment, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    names = PluginNames("rusty", ANY_ISA, native=True)
    write_plugin(names, folder)
    header = folder / "include" / "int8moe" / "abi.h"
    text = header.read_text()
    version = re.search(r"INT8MOE_DRIVER_VERSION (\d+)", text)
    assert version is not None
    header.write_text(text.replace(version[0], "INT8MOE_DRIVER_VERSION 99"))
    install(environment, folder)
    reason = rows(environment)["rusty.scalar"]["reason"]
    assert f"has driver version 99, this int8moe needs {version[1]}" in reason
    assert "reinstall int8moe-rusty" in reason

    where = environment.run("-c", "import int8moe_rusty; print(int8moe_rusty.__path__[0])").stdout.strip()
    (Path(where) / "libint8moe_rusty.so").unlink()
    assert "libint8moe_rusty.so is missing" in rows(environment)["rusty.scalar"]["reason"]


def documented_commands(page: Path) -> list[str]:
    """The lines of the page's ``sh`` blocks, without comments."""
    blocks = re.findall(r"^```sh\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    lines = [line.partition("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


@pytest.mark.slow
def test_the_commands_of_the_documentation_run_in_their_order(
    environment: Environment, repository: Path, tmp_path: Path
) -> None:
    commands = documented_commands(repository / "docs" / "write-a-kernel-plugin.md")
    assert any(command.startswith("int8moe new-plugin") for command in commands)
    for command in commands:
        program, *arguments = shlex.split(command)
        assert program in ("int8moe", "python"), f"{command}: this test does not know that program"
        if program == "int8moe":
            arguments = ["-m", "int8moe", *arguments]
        if arguments[:3] == ["-m", "pip", "install"]:  # with the build tools that are here, and not from the network
            arguments[3:3] = ["--disable-pip-version-check", "-q", "--no-deps", "--no-build-isolation"]
        done = environment.run(*arguments, cwd=tmp_path)
        assert done.returncode == 0, (command, done.stdout, done.stderr)


# ---- what is written, without building it ------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[Variant, Path]:
    folder = tmp_path_factory.mktemp("written")
    return {variant: write_plugin(variant.names, folder / variant.namespace).folder for variant in VARIANTS}


def tool(repository: Path, *arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=repository, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("rules", ["its own", "the project's"])
def test_ruff_finds_nothing(written: dict[Variant, Path], repository: Path, rules: str) -> None:
    pytest.importorskip("ruff", reason="ruff is not installed (extra dev)")
    for folder in written.values():
        options = [str(folder)]
        if rules != "its own":  # tests of a third party are no tests of ours: what they may leave out is said here
            ignored = f"lint.per-file-ignores = {{'{folder}/tests/*' = ['D']}}"
            sources = f"src = ['{folder / 'src'}']"
            options += ["--config", str(repository / "pyproject.toml"), "--config", ignored, "--config", sources]
        tool(repository, "ruff", "check", "--no-cache", *options)
        tool(repository, "ruff", "format", "--no-cache", "--check", *options[: 1 if rules == "its own" else 3])


@pytest.mark.slow
def test_mypy_finds_nothing(written: dict[Variant, Path], repository: Path) -> None:
    pytest.importorskip("mypy", reason="mypy is not installed (extra dev)")
    packages = [str(folder / "src" / variant.names.package) for variant, folder in written.items()]
    tool(repository, "mypy", "--config-file", "pyproject.toml", *packages)


def test_nothing_is_left_to_fill_in(written: dict[Variant, Path]) -> None:
    for folder in written.values():
        for path in folder.rglob("*"):
            assert not re.search(r"NAMESPACE|PACKAGE|SHORT_NAME|\.in$", path.name), path
            if path.is_file() and "include" not in path.parts:
                assert not re.search(r"@[A-Z_]+@", path.read_text()), path


def test_the_headers_are_the_core_s(written: dict[Variant, Path]) -> None:
    own = {path.name: path.read_bytes() for path in Path(get_include(), "int8moe").glob("*.h")}
    for variant, folder in written.items():
        copied = {path.name: path.read_bytes() for path in (folder / "include" / "int8moe").glob("*")}
        assert copied == (own if variant.native else {})


def test_the_conformance_suite_is_three_lines(written: dict[Variant, Path]) -> None:
    for variant, folder in written.items():
        lines = (folder / "tests" / "test_conformance.py").read_text().splitlines()
        assert lines == [
            "from int8moe.testing.suite import *  # noqa: F403",
            "",
            f'kernel = "{variant.names.kernel}"',
        ]


def test_the_layout_is_named_in_one_place(written: dict[Variant, Path]) -> None:
    """So that a new name is written once."""
    for variant, folder in written.items():
        code = "".join(path.read_text() for path in (folder / "src").rglob("*.py"))
        assert code.count(f'"{variant.names.layout}"') == 1, variant


def test_nothing_of_this_machine_is_written(written: dict[Variant, Path], repository: Path) -> None:
    for folder in written.values():
        for path in folder.rglob("*"):
            if path.is_file():
                assert str(repository) not in path.read_text()
                assert str(folder) not in path.read_text()


def test_the_templates_travel_with_the_wheel(repository: Path, tmp_path: Path) -> None:
    """As hatchling sees it, which leaves out what git ignores."""
    code = """
import json, sys
from hatchling.builders.wheel import WheelBuilder
print(json.dumps([file.distribution_path for file in WheelBuilder(sys.argv[1]).recurse_included_files()]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(repository)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    packed = {name for name in json.loads(done.stdout) if name.startswith("int8moe/scaffold/templates/")}
    here = {
        path.relative_to(repository / "src").as_posix()
        for path in (repository / "src/int8moe/scaffold/templates").rglob("*")
        if path.is_file()
    }
    assert packed == here
    assert len(here) > 15
