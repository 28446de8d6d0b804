"""Discovery in isolation: good, broken, duplicate and blocked plugins side by side."""

from __future__ import annotations

from pathlib import Path

import pytest

from plugin_folder import EXPERTS, PROVIDER, PluginFolder

STATES = """
import json
from int8moe.listing import list_kernels, list_plugins
from int8moe.registry import get_registry
print(json.dumps({
    "plugins": {f"{p.distribution}/{p.name}": [p.state, p.error] for p in list_plugins()},
    "kernels": [k.name for k in list_kernels()],
    "tracebacks": {r.name: r.traceback for r in get_registry().plugins()},
}))
"""

BROKEN = {
    "import_error": ("import nothing_of_that_name", "ModuleNotFoundError"),
    "syntax_error": ("def (", "SyntaxError"),
    "exits": ("raise SystemExit(3)", "SystemExit"),
    "raises": (
        "from int8moe import hookimpl\n@hookimpl\ndef register_kernels(): raise RuntimeError('no luck')",
        "no luck",
    ),
    "returns_none": ("from int8moe import hookimpl\n@hookimpl\ndef register_kernels(): return None", "list of KernelSpec"),
    "returns_words": ("from int8moe import hookimpl\n@hookimpl\ndef register_kernels(): return ['x']", "KernelSpec"),
    "no_marker": ("def register_kernels(): return []", "not marked @hookimpl"),
    "misspelt": ("from int8moe import hookimpl\n@hookimpl\ndef register_kernel(): return []", "did you mean register_kernels"),
    "extra_argument": ("from int8moe import hookimpl\n@hookimpl\ndef register_kernels(host): return []", "register_kernels"),
    "empty_module": ("", "register_kernels"),
    "unprintable": ("class Odd(Exception):\n    def __str__(self): raise ValueError\nraise Odd", "Odd"),
    "exits_when_printed": ("class Odd(Exception):\n    def __str__(self): raise SystemExit(3)\nraise Odd", "Odd"),
    "prints_no_text": ("class Odd(Exception):\n    def __str__(self): return 3\nraise Odd", "Odd"),
    "unprintable_of_ours": (
        "from int8moe import PluginLoadError\nclass Odd(PluginLoadError):\n    def __str__(self): raise ValueError\nraise Odd",
        "Odd",
    ),
    "unprintable_answer": (
        "from int8moe import hookimpl\nclass Odd:\n    def __repr__(self): raise ValueError('no repr')\n"
        "@hookimpl\ndef register_kernels(): return [Odd()]",
        "no repr",
    ),
    "asks_at_import": ("from int8moe import list_kernels\nlist_kernels()", "register_kernels of 'bad'"),
    "asks_in_its_hook": (
        "from int8moe import hookimpl, list_kernels\n@hookimpl\ndef register_kernels(): return list_kernels()",
        "asks the registry while it is being filled",
    ),
    "asks_for_plugins": (
        "from int8moe import hookimpl\nfrom int8moe.listing import list_plugins\n"
        "@hookimpl\ndef register_kernels(): return list_plugins()",
        "asks the registry while it is being filled",
    ),
    "selects": (
        "from int8moe import MoEConfig, hookimpl, select_kernel\n@hookimpl\ndef register_kernels():\n"
        "    return [select_kernel(MoEConfig(num_experts=2, top_k=1, hidden_size=8, intermediate_size=8))]",
        "asks the registry while it is being filled",
    ),
    "registers_live": (
        "import int8moe.reference_provider as other\nfrom int8moe import register_kernel\nregister_kernel(other)",
        "asks the registry while it is being filled",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_plugin_is_listed_and_the_others_work(plugins: PluginFolder, kind: str) -> None:
    text, word = BROKEN[kind]
    plugins.add_good()
    plugins.add("bad-kernels", {"bad": "bad_plugin"}, {"bad_plugin": text})
    found = plugins.json(STATES)
    state, error = found["plugins"]["bad-kernels/bad"]
    assert state == "broken"
    assert word in error
    assert "\n" not in error
    assert found["plugins"]["acme-kernels/acme"] == ["loaded", ""]
    assert {"acme.fast", "reference.torch"} <= set(found["kernels"])
    assert "Traceback" in found["tracebacks"]["bad"]
    strict = plugins.run(STATES, INT8MOE_STRICT="1")
    assert strict.returncode != 0
    assert "PluginLoadError" in strict.stderr
    assert "bad-kernels" in strict.stderr


# What the command sets: pydantic's own search of entry points fails on a damaged distribution, as torch's does.
NO_PYDANTIC_PLUGINS = {"PYDANTIC_DISABLE_PLUGINS": "__all__"}
NOT_READABLE = {"no equals sign": b"[int8moe.kernels]\nacme\n", "not UTF-8": b"[int8moe.kernels]\n\xff = x\n"}


@pytest.mark.parametrize("kind", NOT_READABLE)
def test_damaged_entry_points_are_one_broken_distribution(plugins: PluginFolder, kind: str) -> None:
    plugins.add_good()
    plugins.add("torn-kernels", {"torn": "torn_plugin"})
    (plugins.folder / "torn_kernels-1.0.dist-info" / "entry_points.txt").write_bytes(NOT_READABLE[kind])
    found = plugins.json(STATES, **NO_PYDANTIC_PLUGINS)
    state, error = found["plugins"]["torn-kernels/torn-kernels"]
    assert state == "broken"
    assert "entry_points.txt" in error
    assert found["plugins"]["acme-kernels/acme"] == ["loaded", ""]
    assert {"acme.fast", "reference.torch"} <= set(found["kernels"])
    assert (
        plugins.json(STATES, **NO_PYDANTIC_PLUGINS, INT8MOE_PLUGINS="acme")["plugins"]["torn-kernels/torn-kernels"][0]
        == "blocked"
    )
    strict = plugins.run(STATES, **NO_PYDANTIC_PLUGINS, INT8MOE_STRICT="1")
    assert strict.returncode != 0
    assert "torn-kernels" in strict.stderr


def test_a_damaged_distribution_of_others_is_no_plugin(plugins: PluginFolder) -> None:
    plugins.add_good()
    whole = plugins.json(STATES, **NO_PYDANTIC_PLUGINS, INT8MOE_STRICT="1")
    plugins.add("other-tool", {})
    (plugins.folder / "other_tool-1.0.dist-info" / "entry_points.txt").write_text("[console_scripts]\nother-tool\n")
    assert plugins.json(STATES, **NO_PYDANTIC_PLUGINS, INT8MOE_STRICT="1") == whole


def test_the_first_of_two_versions_counts_beside_a_damaged_distribution(plugins: PluginFolder, tmp_path: Path) -> None:
    plugins.add_good()
    plugins.add("torn-kernels", {"torn": "torn_plugin"})
    (plugins.folder / "torn_kernels-1.0.dist-info" / "entry_points.txt").write_text("[int8moe.kernels]\nacme\n")
    later = PluginFolder(tmp_path / "later")
    later.folder.mkdir()
    later.add("Acme.Kernels", {"acme": "no_such_module"}, version="0.1")
    found = plugins.json(f"import sys; sys.path.append({str(later.folder)!r})\n{STATES}", **NO_PYDANTIC_PLUGINS)
    assert {name for name in found["plugins"] if name.endswith("/acme")} == {"acme-kernels/acme"}


@pytest.mark.parametrize("torn", [False, True], ids=["alone", "beside damaged entry points"])
@pytest.mark.parametrize("metadata", [None, "", "Metadata-Version: 2.1\n"], ids=["absent", "empty", "nameless"])
def test_a_distribution_without_metadata_works(plugins: PluginFolder, metadata: str | None, torn: bool) -> None:
    for name in ("acme", "other"):
        plugins.add_good(name)
        file = plugins.folder / f"{name}_kernels-1.0.dist-info" / "METADATA"
        file.unlink() if metadata is None else file.write_text(metadata)
    if torn:
        plugins.add("torn-kernels", {"torn": "torn_plugin"})
        (plugins.folder / "torn_kernels-1.0.dist-info" / "entry_points.txt").write_text("[int8moe.kernels]\nacme\n")
    found = plugins.json(STATES, **NO_PYDANTIC_PLUGINS)["plugins"]
    assert found["(unknown)/acme"] == found["(unknown)/other"] == ["loaded", ""]
    code = """
    import json
    from int8moe import list_kernels
    from int8moe.registry import hints
    print(json.dumps([sorted({k.version for k in list_kernels() if k.distribution == "(unknown)"}), hints()]))
    """
    assert plugins.json(code, **NO_PYDANTIC_PLUGINS)[0] == [""]


def test_a_class_as_entry_point_is_refused_by_name(plugins: PluginFolder) -> None:
    text = """
    from int8moe import hookimpl
    class Provider:
        @hookimpl
        def register_kernels(self): return []
    instance = Provider()
    """
    plugins.add("cls", {"cls": "cls_plugin:Provider"}, {"cls_plugin": text})
    plugins.add("inst", {"inst": "cls_plugin:instance"})
    found = plugins.json(STATES)["plugins"]
    assert found["cls/cls"][0] == "broken"
    assert "class Provider" in found["cls/cls"][1]
    assert found["inst/inst"] == ["loaded", ""]


def test_a_kernel_outside_the_namespace_is_refused(plugins: PluginFolder) -> None:
    plugins.add(
        "stray", {"stray": "stray_plugin"}, {"stray_plugin": PROVIDER.format(namespace="other", module="x", isa="()")}
    )
    state, error = plugins.json(STATES)["plugins"]["stray/stray"]
    assert state == "broken"
    assert "outside the namespace 'stray'" in error


@pytest.mark.parametrize(("field", "word"), [("api_version=99", "plugin API 99"), ("api_version=0", "plugin API 0")])
def test_another_api_version_is_incompatible(plugins: PluginFolder, field: str, word: str) -> None:
    text = PROVIDER.format(namespace="old", module="old", isa="()").replace("priority=50", f"priority=50, {field}")
    plugins.add("old", {"old": "old_plugin"}, {"old_plugin": text})
    state, error = plugins.json(STATES)["plugins"]["old/old"]
    assert state == "incompatible"
    assert word in error


def test_another_numerics_version_is_incompatible(plugins: PluginFolder) -> None:
    text = PROVIDER.format(namespace="old", module="old", isa="()").replace("bitwise()", "bitwise(version=7)")
    plugins.add("old", {"old": "old_plugin"}, {"old_plugin": text})
    state, error = plugins.json(STATES)["plugins"]["old/old"]
    assert state == "incompatible"
    assert "numerics version 7" in error


def test_the_same_entry_point_twice_is_ignored_once(plugins: PluginFolder) -> None:
    plugins.add_good()
    plugins.add("acme-kernels-copy", {"acme": "acme_plugin"})
    found = plugins.json(STATES)
    states = sorted(state for name, (state, _) in found["plugins"].items() if name.endswith("/acme"))
    assert states == ["duplicate", "loaded"]
    assert found["kernels"].count("acme.fast") == 1


def test_a_clash_names_both_and_has_a_fixed_winner(plugins: PluginFolder) -> None:
    for name in ("zeta", "alpha"):
        module = f"{name}_plugin"
        plugins.add(name, {"acme": module}, {module: PROVIDER.format(namespace="acme", module=module, isa="()"),
                                             f"{module}_experts": EXPERTS})  # fmt: skip
    plugins.add_good("other")
    for _ in range(2):
        found = plugins.json(STATES)
        assert found["plugins"]["alpha/acme"] == ["loaded", ""]
        state, error = found["plugins"]["zeta/acme"]
        assert state == "duplicate"
        assert "alpha" in error
        assert "zeta" in error
        assert "other.fast" in found["kernels"]


def test_blocked_plugins_are_not_imported(plugins: PluginFolder) -> None:
    plugins.add_good()
    plugins.add("loud", {"loud": "loud_plugin"}, {"loud_plugin": "print('imported')"})
    for env in ({"INT8MOE_DISABLE_PLUGINS": "loud"}, {"INT8MOE_PLUGINS": "acme"}):
        found = plugins.json(STATES, **env)  # the document would not parse if "imported" were printed
        assert found["plugins"]["loud/loud"][0] == "blocked"
        assert next(iter(env)) in found["plugins"]["loud/loud"][1]
        assert "acme.fast" in found["kernels"]
    alone = plugins.json(STATES, INT8MOE_PLUGINS="reference")
    assert alone["kernels"] == ["reference.torch"]


@pytest.mark.parametrize("value", ["", " ", ",", " , "])
@pytest.mark.parametrize("variable", ["INT8MOE_PLUGINS", "INT8MOE_DISABLE_PLUGINS"])
def test_a_list_without_names_is_no_list(plugins: PluginFolder, variable: str, value: str) -> None:
    plugins.add_good()
    assert plugins.json(STATES, **{variable: value})["plugins"]["acme-kernels/acme"] == ["loaded", ""]


@pytest.mark.parametrize("value", ["acmee,acme", "acmee", "reference,acmee"])
def test_an_absent_plugin_cannot_be_asked_for(plugins: PluginFolder, value: str) -> None:
    plugins.add_good()
    done = plugins.run(STATES, INT8MOE_PLUGINS=value)
    assert done.returncode != 0
    line = done.stderr.splitlines()[-1]
    assert "ConfigError: INT8MOE_PLUGINS names 'acmee', which is not installed; did you mean acme?" in line
    installed = line.partition("installed: ")[2].split(", ")  # beside whatever the environment of the tests has
    assert {"acme", "reference"} <= set(installed)
    assert installed == sorted(installed)


def test_an_absent_plugin_is_refused_each_time(plugins: PluginFolder) -> None:
    code = """
    from int8moe import ConfigError, list_kernels
    for _ in range(2):
        try:
            list_kernels()
        except ConfigError as error:
            print(error)
    """
    lines = plugins.run(code, INT8MOE_PLUGINS="zz").stdout.splitlines()
    assert len(lines) == 2
    assert lines[0] == lines[1]
    assert "'zz'" in lines[0]


def test_an_absent_name_among_those_to_leave_out_is_a_warning(plugins: PluginFolder) -> None:
    plugins.add_good()
    done = plugins.run(STATES, INT8MOE_DISABLE_PLUGINS="acmee,reference")
    assert done.returncode == 0
    assert "INT8MOE_DISABLE_PLUGINS names 'acmee'" in done.stderr
    assert "did you mean acme" in done.stderr
    assert "names 'reference'" not in done.stderr


def test_an_unknown_variable_is_warned_about(plugins: PluginFolder) -> None:
    done = plugins.run(STATES, INT8MOE_KERNAL="x")
    assert "INT8MOE_KERNAL is set" in done.stderr
    assert "INT8MOE_KERNEL" in done.stderr


def test_hints_name_what_would_help(plugins: PluginFolder) -> None:
    lines = plugins.json(
        """
        import json
        from int8moe import HostInfo
        from int8moe.registry import get_registry, hints
        installed = {record.distribution for record in get_registry().plugins()}
        print(json.dumps([hints(HostInfo(machine=m, system="Linux")) for m in ("x86_64", "riscv64")] + [sorted(installed)]))
        """
    )
    if "int8moe-x86-vnni" in lines[2]:
        assert lines[0] == []
    else:
        assert "int8moe-x86-vnni" in lines[0][0]
    assert lines[1] == []
