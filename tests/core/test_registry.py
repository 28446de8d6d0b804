"""Discovery in isolation: good, broken, duplicate and blocked plugins side by side."""

from __future__ import annotations

import pytest

from plugin_folder import EXPERTS, PROVIDER, PluginFolder

STATES = """
import json
from int8moe.registry import get_registry, list_kernels, list_plugins
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
    done = plugins.run(STATES, INT8MOE_PLUGINS="")
    assert '"acme-kernels/acme": ["blocked"' in done.stdout


def test_an_absent_name_in_a_list_is_warned_about(plugins: PluginFolder) -> None:
    plugins.add_good()
    done = plugins.run(STATES, INT8MOE_PLUGINS="acmee,acme")
    assert "INT8MOE_PLUGINS names 'acmee'" in done.stderr
    assert "did you mean acme" in done.stderr


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
