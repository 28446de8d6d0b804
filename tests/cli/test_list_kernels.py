"""``int8moe list-kernels``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .conftest import Command

KERNEL_FIELDS = [
    "name",
    "distribution",
    "version",
    "device",
    "isa",
    "available",
    "reason",
    "layout",
    "numerics",
    "priority",
]
PLUGIN_FIELDS = ["name", "distribution", "version", "state", "error"]
LONG_REASON = "libacme.so.3 cannot be opened; " * 8 + "install acme-runtime"


def by_name(rows: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in rows}


def test_document(int8moe: Command) -> None:
    document = int8moe.json("list-kernels")
    assert list(document) == ["schema", "kernels", "plugins"]
    assert document["schema"] == 1
    assert all(list(row) == KERNEL_FIELDS for row in document["kernels"])
    assert all(list(row) == PLUGIN_FIELDS for row in document["plugins"])
    reference = by_name(document["kernels"])["reference.torch"]
    assert reference["available"] is True
    assert reference["reason"] == ""
    assert (reference["device"], reference["isa"], reference["priority"]) == ("cpu", [], 0)
    assert by_name(document["plugins"])["reference"]["state"] == "loaded"


def test_plugins_of_every_state(int8moe: Command, plugins: Any) -> None:
    """One good plugin, one for another machine, and three that fail in ways of their own."""
    plugins.add_good("acme")
    plugins.add_good("zvx", isa='(("zvx9", "zmat2"),)')
    plugins.add("import-error", {"imp": "imp_plugin"}, {"imp_plugin": f"raise ImportError({LONG_REASON!r})"})
    plugins.add("exits", {"leaver": "leaver_plugin"}, {"leaver_plugin": "raise SystemExit(3)"})
    plugins.add("absent", {"gone": "no_such_module"})

    document = int8moe.json("list-kernels", site=plugins.folder)
    kernels, states = by_name(document["kernels"]), by_name(document["plugins"])
    assert kernels["acme.fast"]["available"]
    assert not kernels["zvx.fast"]["available"]
    assert "zvx9" in kernels["zvx.fast"]["reason"]
    assert {name: states[name]["state"] for name in ("acme", "imp", "leaver", "gone")} == {
        "acme": "loaded",
        "imp": "broken",
        "leaver": "broken",
        "gone": "broken",
    }
    assert states["imp"]["distribution"] == "import-error"
    assert LONG_REASON.strip() in states["imp"]["error"]
    assert "SystemExit" in states["leaver"]["error"]

    done = int8moe("list-kernels", site=plugins.folder, COLUMNS="40")
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    for line in (
        kernels["zvx.fast"]["reason"],
        states["imp"]["error"],
        states["leaver"]["error"],
        states["gone"]["error"],
    ):
        assert line in done.stdout  # in one piece: nothing is cut or folded in a pipe
    for name in ("acme.fast", "zvx.fast", "reference.torch"):
        row = next(line for line in done.stdout.splitlines() if line.startswith(f"{name} "))
        for key in ("distribution", "version", "device", "layout", "numerics", "priority"):
            assert str(kernels[name][key]) in row


def test_damaged_entry_points_are_listed(int8moe: Command, plugins: Any) -> None:
    plugins.add_good("acme")
    plugins.add("torn-kernels", {})
    (plugins.folder / "torn_kernels-1.0.dist-info" / "entry_points.txt").write_text("[int8moe.kernels]\nacme\n")
    document = int8moe.json("list-kernels", site=plugins.folder)
    assert by_name(document["plugins"])["torn-kernels"]["state"] == "broken"
    assert by_name(document["kernels"])["acme.fast"]["available"]


def test_duplicate_and_blocked(int8moe: Command, plugins: Any) -> None:
    plugins.add_good("acme")
    plugins.add("other", {"acme": "other_plugin"}, {"other_plugin": ""})
    document = int8moe.json("list-kernels", site=plugins.folder)
    states = sorted(row["state"] for row in document["plugins"] if row["name"] == "acme")
    assert states == ["duplicate", "loaded"]
    document = int8moe.json("list-kernels", site=plugins.folder, INT8MOE_DISABLE_PLUGINS="acme")
    assert "acme.fast" not in by_name(document["kernels"])


def test_strict_mode_is_an_error(int8moe: Command, plugins: Any) -> None:
    plugins.add("import-error", {"imp": "imp_plugin"}, {"imp_plugin": "import no_such_thing"})
    assert "INT8MOE_STRICT" in int8moe.error("list-kernels", site=plugins.folder, INT8MOE_STRICT="1")


def test_table_ends_with_threads_and_hints(int8moe: Command) -> None:
    """The number of threads and where it is from; which distribution would help, unless it is installed."""
    done = int8moe("list-kernels", INT8MOE_NUM_THREADS="3")
    machine = next(line for line in done.stdout.splitlines() if line.startswith("machine: "))
    assert "thread" in machine
    assert "(" in machine
    import platform

    from int8moe.registry import hints

    assert [line for line in done.stdout.splitlines() if line.startswith("hint: ")] == [
        f"hint: {line}" for line in hints()
    ]
    if platform.machine() == "x86_64":
        assert "int8moe-x86-vnni" in done.stdout


def test_check(int8moe: Command, troubled: Callable[..., Path], plugins: Any) -> None:
    """A kernel whose self-test ends the process, one that is wrong, one that misspelt a hook: each is named."""
    site = troubled(apply="os.kill(os.getpid(), signal.SIGILL)")
    plugins.add_good("wrong")
    experts = site / "wrong_plugin_experts.py"
    experts.write_text(experts.read_text() + "        out.view(torch.uint8)[0, 0] ^= 1\n")
    experts.write_text("import torch\n" + experts.read_text())
    plugins.add_good("hookless")
    (site / "hookless_plugin_experts.py").write_text(
        "from int8moe import hookimpl\nclass FastExperts:\n    @hookimpl\n    def aply(self, layer): pass\n"
    )
    document = int8moe.json("list-kernels", "--check", status=1, site=site)
    checks = {row["name"]: row["check"] for row in document["kernels"]}
    assert checks["reference.torch"] == "ok"
    assert "SIGILL" in checks["acme.fast"]
    assert "self-test" in checks["wrong.fast"]
    assert "process_weights_after_loading" in checks["hookless.fast"] or "aply" in checks["hookless.fast"]
