"""Builds the plugin's units by the recipe of CMakeLists.txt, and programs of tests/native/ with them."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

PLUGIN = Path(__file__).parent.parent
NATIVE = PLUGIN / "tests" / "native"
HEADERS = (PLUGIN / "../../src/int8moe/include", PLUGIN / "include")  # the checkout's, the sdist's
COMPILERS = ("c++", "g++", "clang++")
# What CMake adds to the options by itself, for the properties of the target and a release build.
CMAKE_OPTIONS = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-DNDEBUG")


class Build:
    """The plugin's units, compiled once by the recipe of CMakeLists.txt; programs are linked with them."""

    def __init__(
        self,
        compiler: str,
        folder: Path,
        *,
        tiers: Collection[str] | None = None,
        link: tuple[str, ...] = ("-static",),
        extra: tuple[str, ...] = (),
    ) -> None:
        """Compile the units.

        Args:
            compiler: a C++ compiler.
            folder: where objects and programs go.
            tiers: build these, and those that the dispatcher always has; None = all.
            link: options of the linker.
            extra: options of the compiler, behind all others.
        """
        self.compiler, self.folder, self.link, self.extra = compiler, folder, link, extra
        recipe = (PLUGIN / "CMakeLists.txt").read_text()
        known = self._find(r"set\(tiers ([^)]*)\)", recipe).split()
        flags: dict[str, list[str]] = {}
        for tier, words in re.findall(r"set\(flags_(\w+) ([^)]*)\)", recipe):
            flags[tier] = [f for word in words.split() for f in flags.get(word[len("${flags_") : -1], [word])]
        assert list(flags) == known, "CMakeLists.txt was changed: change this test with it"
        samples = dict(re.findall(r'set\(sample_(\w+) "([^"]*)"\)', recipe))
        wanted = [tier for tier in known if tiers is None or tier in tiers or tier not in samples]
        self.tiers = [tier for tier in wanted if tier not in samples or self._knows(samples[tier], flags[tier])]
        common = self._find(r"target_compile_options\(int8moe_objects PRIVATE\s([^)]*)\)", recipe).split()
        common += [f"-DINT8MOE_TIER_{tier}=1" for tier in self.tiers]
        units = {"dispatcher": [], **{f"tier_{tier}": flags[tier] for tier in self.tiers}}
        with ThreadPoolExecutor() as pool:
            compiled = [pool.submit(self.compile, PLUGIN / f"csrc/{u}.cpp", *common, *own) for u, own in units.items()]
        self.objects = [unit.result() for unit in compiled]

    @staticmethod
    def _find(pattern: str, text: str) -> str:
        match = re.search(pattern, text)
        assert match, f"CMakeLists.txt has no {pattern}: change this test with it"
        return match[1]

    def _knows(self, sample: str, flags: list[str]) -> bool:
        """Whether the compiler and its assembler know a tier's instructions."""
        command = [self.compiler, *flags, "-x", "c++", "-c", "-", "-o", str(self.folder / "sample.o")]
        program = f"#include <immintrin.h>\n{sample}"
        return subprocess.run(command, input=program, text=True, capture_output=True, check=False).returncode == 0

    def require(self, tier: str) -> None:
        if tier not in self.tiers:
            pytest.skip(f"{self.compiler} is too old for {tier}")

    def compile(self, source: Path, *options: str) -> Path:
        headers = next(folder for folder in HEADERS if (folder / "int8moe" / "abi.h").exists())
        built = self.folder / f"{source.stem}.o"
        include = ("-I", str(headers), "-I", str(PLUGIN / "csrc"))
        files = ("-c", str(source), "-o", str(built))
        subprocess.run([self.compiler, *CMAKE_OPTIONS, *options, *self.extra, *include, *files], check=True)
        return built

    def program(self, source: Path) -> Path:
        built = self.folder / source.stem
        objects = [self.compile(source, "-O1", "-fno-exceptions", "-fno-rtti"), *self.objects]
        subprocess.run([self.compiler, *self.link, *map(str, objects), "-o", str(built)], check=True)
        return built
