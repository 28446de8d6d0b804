"""Plugins are loaded in a process of its own: whatever they do to it is a finding, and the others are still read."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from int8moe.diagnosis import distributions
from int8moe.diagnosis import plugins as plugins_check
from int8moe.diagnosis.discovery import Discovery, discover
from int8moe.diagnosis.finding import Finding
from int8moe.diagnosis.probe_process import Probes
from plugin_folder import PROVIDER, PluginFolder

ENDINGS = {
    "segfault": ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "was ended by SIGSEGV"),
    "leaves": ("import os; os._exit(0)", "left with exit status 0"),
    "fails": ("import os; os._exit(3)", "left with exit status 3"),
    "interrupts": ("raise KeyboardInterrupt", "ended by SIGINT"),
}

Discover = Callable[..., Discovery]


@pytest.fixture
def found(plugins: PluginFolder, monkeypatch: pytest.MonkeyPatch) -> Discover:
    """What is discovered with the plugins of the folder."""
    monkeypatch.syspath_prepend(plugins.folder)
    for name in [name for name in os.environ if name.startswith("INT8MOE_")]:
        monkeypatch.delenv(name)

    def run(limit: float = 20.0, **env: str) -> Discovery:
        with Probes(limit, {**os.environ, **env}) as probes:
            return discover(probes)

    return run


def problems(discovery: Discovery) -> list[Finding]:
    findings = [row for row in plugins_check.check(discovery) if row.severity == "problem"]
    assert all(row.mend for row in findings)
    return findings


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_plugin_that_ends_the_process(plugins: PluginFolder, found: Discover, ending: str) -> None:
    """It is named, with what it did and where; the plugins after it are read."""
    code, text = ENDINGS[ending]
    plugins.add("bad-kernels", {"bad": "bad_plugin"}, {"bad_plugin": f"import sys; print('NOISE')\n{code}"})
    plugins.add_good("zeta")
    discovery = found()
    assert "zeta.fast" in [kernel.name for kernel in discovery.kernels]
    (finding,) = problems(discovery)
    assert "plugin 'bad' of bad-kernels" in finding.text
    assert text in finding.text
    assert "INT8MOE_DISABLE_PLUGINS=bad" in finding.mend
    if ending == "segfault":
        assert "bad_plugin.py" in finding.details


def test_a_plugin_that_hangs(plugins: PluginFolder, found: Discover) -> None:
    plugins.add("bad-kernels", {"bad": "bad_plugin"}, {"bad_plugin": "import time; time.sleep(600)"})
    discovery = found(limit=3.0)
    (finding,) = problems(discovery)
    assert "still running after 3 s" in finding.text
    assert "bad_plugin.py" in finding.details  # where it hangs
    assert "reference.torch" in [kernel.name for kernel in discovery.kernels]


def test_two_bad_plugins_and_one_that_is_blocked_already(plugins: PluginFolder, found: Discover) -> None:
    for name in ("bad", "worse"):
        plugins.add(f"{name}-kernels", {name: f"{name}_plugin"}, {f"{name}_plugin": ENDINGS["fails"][0]})
    plugins.add("kept-out", {"kept": "kept_plugin"}, {"kept_plugin": ENDINGS["segfault"][0]})
    discovery = found(INT8MOE_DISABLE_PLUGINS="kept")
    assert [row.name for row in discovery.ended_plugins] == ["bad", "worse"]
    notes = [row for row in plugins_check.check(discovery) if row.severity == "note"]
    assert ["'kept'" in row.text for row in notes] == [True]


def test_a_crash_at_exit_is_found(plugins: PluginFolder, found: Discover) -> None:
    code = "import atexit, os, signal; atexit.register(lambda: os.kill(os.getpid(), signal.SIGSEGV))"
    plugins.add("late-kernels", {"late": "late_plugin"}, {"late_plugin": f"{code}\n" + PROVIDER.format(
        namespace="late", module="late_plugin", isa="()")})  # fmt: skip
    (finding,) = problems(found())
    assert "did its work, but then was ended by SIGSEGV" in finding.text


def test_a_process_that_says_nothing(found: Discover, plugins: PluginFolder) -> None:
    """A module that shadows one of int8moe's own needs: no plugin can be blamed."""
    (plugins.folder / "pluggy.py").write_text(
        "print('int8moe-probe: garbage', flush=True)\nraise ImportError('broken')\n"
    )
    discovery = found()
    assert discovery.kernels == ()
    (finding,) = problems(discovery)
    assert "cannot be read" in finding.text
    assert "broken" in finding.details


def test_broken_incompatible_and_duplicate_plugins(plugins: PluginFolder, found: Discover) -> None:
    plugins.add_good("acme")
    plugins.add("other", {"acme": "other_plugin"}, {"other_plugin": ""})
    plugins.add("again", {"acme": "acme_plugin"})
    plugins.add("imp-kernels", {"imp": "imp_plugin"}, {"imp_plugin": "import nothing_of_that_name"})
    future = PROVIDER.format(namespace="future", module="future_plugin", isa="()").replace(
        "priority", "api_version=9, priority"
    )
    plugins.add("future-kernels", {"future": "future_plugin"}, {"future_plugin": future})
    findings = {row.text.split("'")[1]: row for row in plugins_check.check(found()) if row.severity == "problem"}
    assert set(findings) == {"acme", "imp", "future"}
    assert "pip uninstall other" in findings["acme"].mend
    assert "Traceback" in findings["imp"].details
    assert "imp_plugin.py" in findings["imp"].details
    assert "frozen importlib" not in findings["imp"].details
    assert "install an int8moe and a future-kernels that fit each other" in findings["future"].mend
    (same,) = [row for row in plugins_check.check(found()) if row.severity == "note"]
    assert "found already" in same.text


# Their distributions


def with_files(plugins: PluginFolder, *names: str, requires: str = "") -> None:
    plugins.add_good("acme")
    info = plugins.folder / "acme_kernels-1.0.dist-info"
    if requires:
        with (info / "METADATA").open("a") as stream:
            stream.write(f"Requires-Dist: {requires}\n")
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in ("acme_plugin.py", *names)))


def examined(serving: set[str]) -> list[Finding]:
    installed = distributions.find_installed(["acme-kernels"])
    with Probes(20.0, os.environ) as probes:
        opened = {name: future.result() for name, future in distributions.open_libraries(installed, probes).items()}
    return distributions.check(installed, opened, serving)


@pytest.mark.usefixtures("found")
def test_a_library_that_is_missing(plugins: PluginFolder) -> None:
    with_files(plugins, "acme/libacme.so")
    first, finding = examined(set())
    assert first.text == f"acme-kernels 1.0 ({plugins.folder})"
    assert finding.severity == "problem"
    assert f"{plugins.folder / 'acme' / 'libacme.so'} is missing" in finding.text
    assert finding.mend == "pip install --force-reinstall --no-deps acme-kernels"


@pytest.mark.usefixtures("found")
@pytest.mark.parametrize("serves", [False, True])
def test_a_library_that_does_not_load(plugins: PluginFolder, serves: bool) -> None:
    """Where another one of the distribution serves it is for other machines, and only noted."""
    with_files(plugins, "libacme.so.2")
    # It asks for torch once it does not load alone; that is not waited for here.
    (plugins.folder / "torch.py").write_text("")
    (plugins.folder / "libacme.so.2").write_text("no library")
    finding = examined({"acme-kernels"} if serves else set())[1]
    assert finding.severity == ("note" if serves else "problem")
    assert "libacme.so.2 does not load" in finding.text


@pytest.mark.usefixtures("found")
def test_a_requirement_that_is_not_met(plugins: PluginFolder) -> None:
    with_files(plugins, requires="int8moe >= 99; python_version > '3'")
    finding = examined(set())[1]
    assert finding.severity == "problem"
    assert "acme-kernels needs int8moe>=99 (found is " in finding.text


@pytest.mark.usefixtures("found")
@pytest.mark.parametrize(
    "requirement", ["nothing-of-that-name; python_version < '3'", "nothing-of-that-name; extra == 'gpu'", "pluggy"]
)
def test_requirements_that_do_not_matter(plugins: PluginFolder, requirement: str) -> None:
    with_files(plugins, requires=requirement)
    assert {row.severity for row in examined(set())} == {"ok"}


def test_a_broken_plugin_that_is_installed_editable_is_mended_in_its_source(
    plugins: PluginFolder, found: Discover
) -> None:
    plugins.add("bad-kernels", {"bad": "bad_plugin"}, {"bad_plugin": "def ("})
    (finding,) = problems(found())
    assert finding.mend.startswith("pip install --force-reinstall --no-deps bad-kernels, or leave it out: ")
    origin = '{"dir_info": {"editable": true}, "url": "file:///src/bad"}'
    (folder,) = plugins.folder.glob("bad_kernels-*.dist-info")
    (folder / "direct_url.json").write_text(origin)
    (finding,) = problems(found())
    assert finding.mend.startswith("mend its source in /src/bad and pip install -e /src/bad, or leave it out: ")


@pytest.mark.usefixtures("found")
def test_an_editable_install_names_its_folder(plugins: PluginFolder) -> None:
    with_files(plugins, "libacme.so")
    origin = '{"dir_info": {"editable": true}, "url": "file:///src/acme%20moe"}'
    (plugins.folder / "acme_kernels-1.0.dist-info" / "direct_url.json").write_text(origin)
    first, finding = examined(set())
    assert "editable, from /src/acme moe" in first.text
    assert finding.mend == "pip install -e '/src/acme moe'"


@pytest.mark.usefixtures("found")
def test_damaged_metadata(plugins: PluginFolder) -> None:
    with_files(plugins, requires="acme ===")
    (finding,) = distributions.check(distributions.find_installed(["absent-kernels"]), {}, set())
    assert "metadata cannot be read" in finding.text
    assert examined(set())[1].severity == "problem"
