"""Every Python block in the README and in docs/ runs as it stands, and every local link leads somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from plugin_folder import PluginFolder

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path) -> list[str]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def run(code: str, path: str = "") -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("INT8MOE_")}
    clean["PYTHONPATH"] = os.pathsep.join(filter(None, [path, os.environ.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=clean, capture_output=True, text=True, timeout=300, check=False
    )


RUNNABLE = [
    pytest.param(code, id=f"{page.name}-{number}")
    for page in PAGES
    for number, code in enumerate(blocks(page))
    if not code.startswith("# acme_moe/")
]


@pytest.mark.parametrize("code", RUNNABLE)
def test_a_block_runs(code: str) -> None:
    done = run(code)
    assert done.returncode == 0, done.stderr


def test_the_plugin_of_the_readme_is_complete(plugins: PluginFolder) -> None:
    files = {
        code.splitlines()[0].split(":")[0].removeprefix("# "): code
        for code in blocks(ROOT / "README.md")
        if code.startswith("# acme_moe/")
    }
    assert set(files) == {"acme_moe/plugin.py", "acme_moe/experts.py"}
    assert sum(len(code.splitlines()) for code in files.values()) <= 35
    (plugins.folder / "acme_moe").mkdir()
    for name, code in files.items():
        (plugins.folder / name).write_text(code)
    plugins.add("acme-moe", {"acme": "acme_moe.plugin"})
    found = plugins.json(
        """
        import json, torch, int8moe
        config = int8moe.MoEConfig(num_experts=4, top_k=2, hidden_size=48, intermediate_size=20, hidden_dtype="float32")
        layer = int8moe.FusedMoE(config, kernel="acme.fast")
        names = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")
        layer.load_weights(**dict(zip(names, int8moe.quantize_experts(torch.randn(4, 40, 48), torch.randn(4, 48, 20)))))
        layer.process_weights_after_loading()
        out = layer(torch.randn(5, 48), torch.rand(5, 2), torch.randint(0, 4, (5, 2)))
        print(json.dumps([list(out.shape), layer.kernel.name, layer.weight_layout.name]))
        """
    )
    assert found == [[5, 48], "acme.fast", "canonical"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_local_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"
