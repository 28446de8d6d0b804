"""OpenMP runtimes and preloads, from faked lists of a process's libraries."""

from __future__ import annotations

from pathlib import Path

import pytest

from int8moe.diagnosis import openmp, preloads
from int8moe.diagnosis.mapped_libraries import mapped_libraries

TORCH = "/env/torch/lib/libgomp-a34b3233.so.1"
OTHER = "/env/acme libs/libiomp5.so"


def write_maps(proc: Path, *paths: str) -> Path:
    (proc / "self").mkdir(parents=True, exist_ok=True)
    lines = ["7f00-7f01 rw-p 00000000 00:00 0 ", "7f01-7f02 rw-p 00000000 00:00 0    [heap]"]
    lines += [f"7f02-7f03 r-xp 00000000 fe:00 12{number}     {path}" for number, path in enumerate(paths)]
    (proc / "self" / "maps").write_text("\n".join([*lines, *lines]) + "\n")
    return proc


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KMP_DUPLICATE_LIB_OK", "INT8MOE_DISABLE_PLUGINS", *preloads.VARIABLES):
        monkeypatch.delenv(name, raising=False)


def test_libraries_of_a_process(tmp_path: Path) -> None:
    write_maps(tmp_path, TORCH, OTHER, "/usr/bin/python3", "/usr/lib/libold.so (deleted)", "/usr/share/x.sort")
    assert mapped_libraries(tmp_path) == sorted([TORCH, OTHER, "/usr/lib/libold.so"])
    assert mapped_libraries(tmp_path / "absent") is None


def test_one_runtime(tmp_path: Path) -> None:
    libraries = mapped_libraries(write_maps(tmp_path, TORCH, "/lib/libompl.so", "/lib/libm.so.6"))
    (finding,) = openmp.check({"torch": libraries, "acme.fast": libraries})
    assert finding.severity == "ok"
    assert TORCH in finding.text


@pytest.mark.parametrize("second", [OTHER, "/usr/lib/libgomp.so.1.0.0", "/usr/lib/llvm/libomp.so.5"])
def test_two_runtimes_and_who_brought_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second: str) -> None:
    monkeypatch.setenv("INT8MOE_DISABLE_PLUGINS", "hal")
    alone = mapped_libraries(write_maps(tmp_path / "torch", TORCH))
    both = mapped_libraries(write_maps(tmp_path / "acme", TORCH, second))
    (finding,) = openmp.check({"torch": alone, "reference.torch": alone, "acme.fast": both})
    assert finding.severity == "problem"
    assert f"{TORCH} (with torch)" in finding.text
    assert f"{second} (with acme.fast)" in finding.text
    assert "export INT8MOE_DISABLE_PLUGINS=acme,hal;" in finding.mend


def test_two_runtimes_of_torch_alone() -> None:
    (finding,) = openmp.check({"torch": [TORCH, OTHER]})
    assert finding.severity == "problem"
    assert "torch" in finding.mend


def test_a_tolerated_second_runtime_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", "TRUE")
    assert [row.severity for row in openmp.check({"torch": [TORCH]})] == ["ok", "note"]


@pytest.mark.parametrize("libraries", [{}, {"torch": None}])
def test_runtimes_are_not_known(libraries: dict[str, None]) -> None:
    assert [row.severity for row in openmp.check(libraries)] == ["note"]


def test_nothing_is_preloaded(tmp_path: Path) -> None:
    assert {row.severity for row in preloads.check(write_maps(tmp_path))} == {"ok"}
    assert preloads.check(tmp_path)[0].text == "nothing is preloaded"


def test_an_allocator_is_preloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "libjemalloc.so.2"
    library.touch()
    write_maps(tmp_path, str(library))
    for entry in (str(library), "libjemalloc.so", f"$LIB/x.so {library}"):
        monkeypatch.setenv("LD_PRELOAD", entry)
        findings = preloads.check(tmp_path)
        assert {row.severity for row in findings} == {"ok"}
        assert findings[-1].text == f"the allocator is {library}"


@pytest.mark.parametrize("entry", ["{0}/absent.so", "libabsent.so.1", "{0}/present.so"])
def test_a_preload_that_the_system_did_not_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: str) -> None:
    """Missing, or there but refused by the loader: what counts is whether it is in the process."""
    (tmp_path / "present.so").touch()
    monkeypatch.setenv("LD_PRELOAD", entry.format(tmp_path))
    finding = preloads.check(write_maps(tmp_path, "/lib/libc.so.6"))[0]
    assert finding.severity == "problem"
    assert "LD_PRELOAD" in finding.mend
