"""``int8moe doctor``: the real verb, on good and on broken installations."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plugin_folder import PluginFolder

from .conftest import COMMAND, Command

CHECKS = [
    "versions", "distributions", "plugins", "cpu", "kernels", "threads", "memory", "huge_pages", "openmp", "preloads",
    "variables",
]  # fmt: skip
FIELDS = ["check", "severity", "text", "mend", "details"]

# Of the machine that the tests run on, not of what they are about.
MACHINE = {"threads", "memory", "huge_pages", "preloads"}


def problems(document: Any) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for row in document["findings"]:
        if row["severity"] == "problem" and row["check"] not in MACHINE:
            found.setdefault(row["check"], []).append(row)
    return found


def is_document(document: Any) -> bool:
    """Whether it keeps the schema; the counts are right and no problem is without a mend."""
    assert list(document) == ["schema", "num_problems", "num_notes", "findings"]
    assert document["schema"] == 1
    assert all(list(row) == FIELDS and all(isinstance(value, str) for value in row.values())
               for row in document["findings"])  # fmt: skip
    counts = Counter(row["severity"] for row in document["findings"])
    assert (counts["problem"], counts["note"]) == (document["num_problems"], document["num_notes"])
    assert set(counts) <= {"ok", "note", "problem"}
    assert all(row["mend"] for row in document["findings"] if row["severity"] == "problem")
    return True


def examined(int8moe: Command, *arguments: str, site: Path | None = None, **env: str) -> Any:
    """The document of a run, whose exit status agrees with it and which prints nothing else."""
    done = int8moe("doctor", "--json", *arguments, site=site, **env)
    assert done.stderr == ""
    import json

    document = json.loads(done.stdout)
    assert is_document(document)
    assert done.returncode == int(document["num_problems"] > 0)
    return document


def test_a_good_installation(int8moe: Command, plugins: PluginFolder) -> None:
    """Every check is made; a kernel for another machine is no problem."""
    plugins.add_good("acme")
    plugins.add_good("zvx", isa='(("zvx9", "zmat2"),)')
    document = examined(int8moe, site=plugins.folder)
    assert list(dict.fromkeys(row["check"] for row in document["findings"])) == CHECKS
    assert problems(document) == {}
    texts = [row["text"] for row in document["findings"]]
    for kernel in ("reference.torch", "acme.fast"):
        assert any(text.startswith(f"{kernel} passes its self-test") for text in texts)
    assert any(text.startswith("zvx.fast cannot run here") for text in texts)


def test_every_kind_of_trouble_at_once(int8moe: Command, plugins: PluginFolder, troubled: Callable[..., Path]) -> None:
    """One line each, with its mend, below the heading of its check; tracebacks too; nothing on stderr."""
    site = troubled(apply="print('NOISE'); os.kill(os.getpid(), signal.SIGILL)")
    plugins.add(
        "crashing", {"crash": "crash_plugin"}, {"crash_plugin": "import os; print('NOISE'); os.kill(os.getpid(), 11)"}
    )
    plugins.add("leaving", {"leaver": "leaver_plugin"}, {"leaver_plugin": "raise SystemExit(3)"})
    plugins.add_good("wrong")
    experts = site / "wrong_plugin_experts.py"
    experts.write_text("import torch\n" + experts.read_text() + "        out.view(torch.uint8)[0, 0] ^= 1\n")
    done = int8moe(
        "doctor", site=site, INT8MOE_KERNELL="x", INT8MOE_KERNEL="wrong.fast", INT8MOE_LOG="loud", INT8MOE_STRICT="1",
        INT8MOE_PLUGINS="acme,crash,leaver,wrong,absent",
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    for text in (
        "plugin 'crash' of crashing: the process that loaded it was ended by SIGSEGV",
        "plugin 'leaver' of leaving 1.0 is broken: SystemExit: 3",
        "acme.fast: the process of its self-test was ended by SIGILL",
        "wrong.fast does not pass",
        "INT8MOE_KERNELL is set, but nothing reads it; did you mean INT8MOE_KERNEL",
        "INT8MOE_LOG='loud'",
        "INT8MOE_PLUGINS names 'absent'",
        "INT8MOE_KERNEL names wrong.fast, which does not pass its self-test",
    ):
        (number,) = [n for n, line in enumerate(lines) if line.startswith("problem ") and text in line]
        assert lines[number + 1].startswith("mend ")
    assert "leaver_plugin.py" in done.stdout
    assert any(line.startswith("reference.torch passes", 15) for line in lines)
    assert lines[-1].split()[:2] == [str(sum(line.startswith("problem ") for line in lines)), "problems"]


def test_a_self_test_that_hangs(int8moe: Command, troubled: Callable[..., Path]) -> None:
    site = troubled(apply="import time; time.sleep(600)")
    document = examined(int8moe, "--time-limit", "4", site=site, INT8MOE_PLUGINS="acme")
    (finding,) = [row for row in problems(document)["kernels"] if row["text"].startswith("acme.fast")]
    assert "still running after 4 s" in finding["text"]
    assert "acme_plugin_experts.py" in finding["details"]


@pytest.mark.parametrize(
    ("module", "code", "check", "text"),
    [
        ("torch", "raise ImportError('libtorn.so is missing')", "versions", "libtorn.so is missing"),
        ("torch", "import os; os.kill(os.getpid(), 4)", "versions", "SIGILL"),
        ("pydantic", "raise ImportError('torn')", "examination", "torn"),
    ],
)
def test_what_int8moe_is_built_on_is_broken(
    int8moe: Command, plugins: PluginFolder, module: str, code: str, check: str, text: str
) -> None:
    (plugins.folder / "torch.py").write_text("raise ImportError('not waited for')")
    (plugins.folder / f"{module}.py").write_text(code)
    document = examined(int8moe, site=plugins.folder)
    assert [text in row["text"] for row in problems(document)[check]] == [True]
    if module == "torch":
        assert list(dict.fromkeys(row["check"] for row in document["findings"])) == CHECKS


def test_ctrl_c_ends_what_it_started(int8moe: Command, plugins: PluginFolder) -> None:
    pid_file = plugins.folder / "pid"
    code = f"import os, pathlib, time; pathlib.Path({str(pid_file)!r}).write_text(f'{{os.getpid()}}.'); time.sleep(600)"
    plugins.add("hanging", {"hang": "hang_plugin"}, {"hang_plugin": code})
    process = subprocess.Popen(
        [*COMMAND, "doctor"],
        env=int8moe.environment(plugins.folder),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while not (pid_file.exists() and pid_file.read_text().endswith(".")):
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 130
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text().rstrip(".")), 0)
