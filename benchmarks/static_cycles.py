"""Cycles of the kernels' inner loops on processors that are not here, by the scheduling models of llvm-mca.

    python benchmarks/static_cycles.py                     # a table, and whether each loop reaches its bar
    python benchmarks/static_cycles.py --unit i8mm --json

Compiles a tier's unit as CMakeLists.txt says, finds the innermost loop of each tile in the assembly, and lets llvm-mca
run it from L1: loads count, cache misses do not. The peak is that of a loop of the tier's multiply-adds alone, in
registers and as many chains. A model is not a measurement: it has its makers' view of a core, and no memory.

Exits with 1 where a loop misses its bar, with 2 where a tool is missing. Without --unit, a tier whose cross-compiler is
missing is left out, and named on stderr.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
from rich.console import Console
from rich.table import Table

REPOSITORY = Path(__file__).resolve().parent.parent
ANALYSERS = ("llvm-mca", *(f"llvm-mca-{version}" for version in range(22, 15, -1)))
ITERATIONS = 400
MODELS_IN = 19  # the LLVM whose models the bars were set with


class Unit(NamedTuple):
    """A tier's translation unit, and what to look for in it.

    Attributes:
        plugin: its folder in plugins/.
        compiler: that makes its assembly.
        flags: of the tier, as in the plugin's CMakeLists.txt.
        target: architecture and features for llvm-mca.
        counted: the instruction that multiplies.
        macs: multiply-adds of one of it.
        chain: one multiply-add in registers, in which {n} is the number of its sum's register; a line each instruction.
        chains: how many of these sums are independent.
        cpus: llvm-mca's names of the processors that it is run for.
        tile: part of the mangled name of the function with the loop for many rows.
        bars: the least fraction of the peak that this loop has to reach: {cpu: fraction}.
    """

    plugin: str
    compiler: str
    flags: tuple[str, ...]
    target: tuple[str, ...]
    counted: str
    macs: int
    chain: str
    chains: int
    cpus: tuple[str, ...]
    tile: str
    bars: dict[str, float]


AARCH64, S390X, X86_64 = "aarch64-linux-gnu-g++", "s390x-linux-gnu-g++", "x86_64-linux-gnu-g++"
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512vnni")
UNITS = {
    "i8mm": Unit(
        "aarch64_neon", AARCH64, ("-march=armv8.2-a+i8mm",), ("-march=aarch64", "-mattr=+i8mm"), "smmla", 32,
        "smmla v{n}.4s, v30.16b, v31.16b", 24, ("neoverse-v1", "neoverse-n2", "neoverse-v2"), "tileILi6ELi1E",
        {"neoverse-v2": 0.85},
    ),
    "dotprod": Unit(
        "aarch64_neon", AARCH64, ("-march=armv8.2-a+dotprod",), ("-march=aarch64", "-mattr=+dotprod"), "sdot", 16,
        "sdot v{n}.4s, v30.16b, v31.16b", 24, ("neoverse-n1", "neoverse-v1", "apple-m1"), "tileILi6ELi1E",
        {"neoverse-n1": 0.80},
    ),
    "neon": Unit(
        "aarch64_neon", AARCH64, ("-march=armv8-a",), ("-march=aarch64",), "smull", 8,
        "smull v29.8h, v30.8b, v31.8b\nsadalp v{n}.4s, v29.8h", 16, ("cortex-a72", "cortex-a57"), "tileILi3ELi1E", {},
    ),
    "vxe": Unit(
        "s390x_vxe", S390X, ("-march=z14", "-mzvector"), ("-mtriple=s390x-linux-gnu",), "vmaeb", 16,
        "vmaeb %v20, %v30, %v31, %v21\nvmaob %v20, %v30, %v31, %v20\n"
        "vsumh %v20, %v20, %v22\nvaf %v{n}, %v{n}, %v20", 16,
        ("z14", "z15", "z16"), "tileILi4E", {},
    ),
    "avx2": Unit(
        "x86_vnni", X86_64, ("-mavx2",), ("-mtriple=x86_64-linux-gnu",), "vpmaddwd", 16,
        "vpmaddwd %ymm14, %ymm15, %ymm13\nvpaddd %ymm13, %ymm{n}, %ymm{n}", 10,
        ("znver3", "haswell", "skylake"), "tileILi6ELi1E", {},
    ),
    "avx_vnni": Unit(
        "x86_vnni", X86_64, ("-mavx2", "-mavxvnni"), ("-mtriple=x86_64-linux-gnu",), "vpdpbusd", 32,
        "{{vex}} vpdpbusd %ymm14, %ymm15, %ymm{n}", 12, ("alderlake",), "tileILi6ELi1E", {},
    ),
    "avx512_vnni": Unit(
        "x86_vnni", X86_64, (*_AVX512, "-mprefer-vector-width=512"), ("-mtriple=x86_64-linux-gnu",), "vpdpbusd", 64,
        "vpdpbusd %zmm30, %zmm31, %zmm{n}", 24, ("icelake-server", "sapphirerapids", "znver4"), "tileILi6ELi4E", {},
    ),
}  # fmt: skip


class Loop(NamedTuple):
    """An innermost loop: where it is, and its instructions."""

    function: str
    lines: list[str]

    @property
    def tile(self) -> str:
        """The template arguments of the function: "6 x 1", or "4" rows of one panel."""
        return " x ".join(re.findall(r"Li(\d+)E", self.function.partition("tileI")[2].partition("EE")[0] + "E"))

    def count(self, instruction: str) -> int:
        """How many of its instructions are this one, or its variant for upper halves."""
        names = (line.removeprefix("{vex} ").split()[0] for line in self.lines)
        return sum(name in (instruction, f"{instruction}2") for name in names)


class Figure(NamedTuple):
    """One loop on one processor; cycles for 64 multiply-adds."""

    unit: str
    tile: str
    cpu: str
    multiplies: int
    instructions: int
    cycles: float
    peak: float
    bar: float | None

    @property
    def fraction(self) -> float:
        """Of the peak."""
        return self.peak / self.cycles


class ToolMissing(click.ClickException):
    """A program that is not installed."""

    exit_code = 2


def find_tool(*names: str) -> str:
    """The first of these programs that is installed."""
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        raise ToolMissing(f"{' or '.join(names)} is not installed")
    return found


def release_of(analyser: str) -> str:
    """Of LLVM, such as 19.1.7."""
    said = subprocess.run([analyser, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"LLVM version (\S+)", said)
    return found[1] if found else "?"


def assembly(name: str, unit: Unit) -> str:
    """Of the tier's unit, compiled with the options of its CMakeLists.txt."""
    plugin = REPOSITORY / "plugins" / unit.plugin
    recipe = (plugin / "CMakeLists.txt").read_text()
    common = re.search(r"target_compile_options\(int8moe_objects PRIVATE\s([^)]*)\)", recipe)
    own = re.search(rf"set\(flags_{name} ([^)]*)\)", recipe)
    if common is None or own is None or tuple(own[1].split()) != unit.flags:
        raise click.ClickException(f"{plugin.name}/CMakeLists.txt has other flags for {name}: change UNITS with it")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "unit.s"
        headers = ("-I", str(REPOSITORY / "src/int8moe/include"), "-I", str(plugin / "csrc"))
        options = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-DNDEBUG", *common[1].split(), *unit.flags)
        source = str(plugin / f"csrc/tier_{name}.cpp")
        subprocess.run([find_tool(unit.compiler), *options, *headers, "-S", source, "-o", str(out)], check=True)
        return out.read_text()


def loops(text: str, counted: str) -> Iterator[Loop]:
    """The loops of the tiles that hold the counted instruction: from a label to a branch back to it."""
    function, since, label = "", [""], ""
    for line in text.splitlines():
        if match := re.match(r"(_Z[\w.]+):", line):
            function, label = match[1], ""
        elif match := re.match(r"(\.L\w+):", line):
            label, since = match[1], []
        elif label and re.match(r"\t[a-z{]", line):
            since.append(line.strip())
            if re.match(rf"\t\S+\t(?:.*[\s,])?{re.escape(label)}$", line):
                loop = Loop(function, list(since))
                if "tileI" in function and loop.count(counted):
                    yield loop


def cycles(analyser: str, unit: Unit, cpu: str, lines: list[str]) -> float:
    """Of one round of a loop, in the steady state."""
    command = [analyser, *unit.target, f"-mcpu={cpu}", f"-iterations={ITERATIONS}", "-json"]
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, check=False)
    if done.returncode:
        raise click.ClickException(f"{' '.join(command)}: {done.stderr.strip()}")
    return float(json.loads(done.stdout)["CodeRegions"][0]["SummaryView"]["TotalCycles"]) / ITERATIONS


def figures(analyser: str, name: str, unit: Unit) -> Iterator[Figure]:
    """Every tile of a unit on every one of its processors."""
    found = list(loops(assembly(name, unit), unit.counted))
    if not any(unit.tile in loop.function for loop in found):
        raise click.ClickException(
            f"no loop with {unit.counted} in a function {unit.tile} of tier_{name}: change UNITS"
        )
    registers = [line for n in range(unit.chains) for line in unit.chain.format(n=n).split("\n")]
    for cpu in unit.cpus:
        peak = cycles(analyser, unit, cpu, registers) / (unit.chains * unit.macs) * 64
        for loop in found:
            multiplies = loop.count(unit.counted)
            bar = unit.bars.get(cpu) if unit.tile in loop.function else None
            spent = cycles(analyser, unit, cpu, loop.lines) / (multiplies * unit.macs) * 64
            yield Figure(name, loop.tile, cpu, multiplies, len(loop.lines), spent, peak, bar)


@click.command(help=(__doc__ or "").partition("\n")[0])
@click.option("--unit", "names", multiple=True, type=click.Choice(list(UNITS)), help="A tier; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def main(names: tuple[str, ...], as_json: bool) -> None:
    """Print the table."""
    analyser = find_tool(f"llvm-mca-{MODELS_IN}", *ANALYSERS)
    release = release_of(analyser)
    wanted = names or tuple(name for name, unit in UNITS.items() if shutil.which(unit.compiler))
    for name in () if names else sorted(UNITS.keys() - set(wanted)):
        click.echo(f"left out {name}: {UNITS[name].compiler} is not installed", err=True)
    table = [f for name in wanted for f in figures(analyser, name, UNITS[name])]
    missed = [f for f in table if f.bar is not None and f.fraction < f.bar]
    if as_json:
        rows = [{**f._asdict(), "fraction": f.fraction} for f in table]
        click.echo(json.dumps({"llvm": release, "figures": rows}, indent=1))
    else:
        printed = Table(title=f"cycles for 64 multiply-adds, llvm-mca {release}", box=None)
        for column in (
            "tier",
            "rows x panels",
            "cpu",
            "multiplies",
            "instructions",
            "cycles",
            "peak",
            "fraction",
            "bar",
        ):
            printed.add_column(column, justify="left" if column in ("tier", "cpu") else "right")
        for f in table:
            bar = "" if f.bar is None else f"{f.bar:.2f} {'missed' if f in missed else 'met'}"
            printed.add_row(f.unit, f.tile, f.cpu, str(f.multiplies), str(f.instructions), f"{f.cycles:.3f}",
                            f"{f.peak:.3f}", f"{f.fraction:.3f}", bar)  # fmt: skip
        Console(width=110).print(printed)
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
