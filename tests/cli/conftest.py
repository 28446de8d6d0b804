"""The real command in subprocesses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import pytest

# As the console script does it, which a source tree does not have.
COMMAND = [sys.executable, "-c", "from int8moe.cli import main; main()"]

# Stand-ins for the hooks of a kernel that is right until something happens; "{trouble}" is done in apply or in pack.
EXPERTS_IN_TROUBLE = """
import os, signal, torch
from int8moe import WeightLayout, hookimpl
from int8moe.reference import ReferenceExperts

class FastExperts:
    @hookimpl
    def process_weights_after_loading(self, layer):
        {pack}
        return WeightLayout.canonical()

    @hookimpl
    def apply(self, layer, hidden_states, topk_weights, topk_ids, out):
        ReferenceExperts().apply(layer, hidden_states, topk_weights, topk_ids, out)
        {apply}
"""

SELF_TEST_HIDDEN = 67
"""hidden_size of the known answer that binding asks of a kernel."""


class Command:
    """Runs ``int8moe``; ``site`` is a folder of distributions that it is to see."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def environment(self, site: Path | None = None, **env: str) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("INT8MOE_")}
        # The command runs in a folder of its own.
        inherited = [
            str(Path(entry).resolve()) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry
        ]
        path = os.pathsep.join([*([str(site)] if site else []), *inherited])
        return {**clean, "PYTHONPATH": path, **env}

    def __call__(
        self,
        *arguments: str,
        site: Path | None = None,
        stdout: int | IO[Any] = subprocess.PIPE,
        **env: str,
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [*COMMAND, *arguments],
            cwd=self.folder,
            env=self.environment(site, **env),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            timeout=120,
            check=False,
        )
        shown = done.stderr if arguments[:1] == ("doctor",) else done.stderr + (done.stdout or "")
        assert "Traceback" not in shown or env.get("INT8MOE_LOG") == "debug"
        return done

    def json(self, *arguments: str, status: int = 0, site: Path | None = None, **env: str) -> Any:
        """The one document that the verb prints with --json."""
        done = self(*arguments, "--json", site=site, **env)
        assert done.returncode == status, done.stderr
        return json.loads(done.stdout)

    def error(self, *arguments: str, status: int = 1, site: Path | None = None, **env: str) -> str:
        """The one line of stderr of a command that fails, and prints nothing else."""
        done = self(*arguments, site=site, **env)
        assert done.returncode == status, done.stderr
        assert done.stdout == ""
        lines = done.stderr.splitlines()
        assert len(lines) == 1, done.stderr
        assert lines[0].startswith("int8moe: error: ")
        return lines[0].removeprefix("int8moe: error: ")


@pytest.fixture(scope="session")
def int8moe(tmp_path_factory: pytest.TempPathFactory) -> Command:
    return Command(tmp_path_factory.mktemp("cwd"))


@pytest.fixture
def troubled(plugins: Any) -> Callable[..., Path]:
    """A plugin whose kernel ``acme.fast`` misbehaves in ``apply`` or ``pack`` in the given way."""

    def make(apply: str = "pass", pack: str = "pass") -> Path:
        plugins.add_good()
        experts = plugins.folder / "acme_plugin_experts.py"
        experts.write_text(EXPERTS_IN_TROUBLE.format(apply=apply, pack=pack))
        folder: Path = plugins.folder
        return folder

    return make


@pytest.fixture(scope="session")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A ``site`` in which importing torch ends the command: what is refused all the same is refused before."""
    folder = tmp_path_factory.mktemp("no_torch")
    (folder / "torch.py").write_text("raise SystemExit('torch is imported')\n")
    return folder


@pytest.fixture(scope="session")
def example() -> Path:
    folder = Path(__file__).resolve().parents[2] / "examples" / "tiny-qwen3-moe-w8a8"
    if not (folder / "config.json").is_file():
        pytest.skip("the checkout has no examples/tiny-qwen3-moe-w8a8")
    return folder


@pytest.fixture(scope="session")
def half_quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A qwen3_moe checkpoint of two layers; layer 0 is on the ignore list and stays bf16."""
    import torch
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("checkpoint")
    hidden, inner, experts = 32, 16, 4
    generator = torch.Generator().manual_seed(3)
    tensors = {}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp"
        tensors[f"{prefix}.gate.weight"] = torch.randn(experts, hidden, generator=generator).bfloat16()
        for expert in range(experts):
            for role, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
                name = f"{prefix}.experts.{expert}.{role}_proj.weight"
                if layer == 0:
                    tensors[name] = torch.randn(shape, generator=generator).bfloat16()
                else:
                    tensors[name] = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
                    tensors[f"{name}_scale"] = torch.rand(shape[0], 1, generator=generator).bfloat16() / 100
    save_file(tensors, folder / "model.safetensors")
    scheme = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**scheme, "strategy": "channel", "dynamic": False},
        "input_activations": {**scheme, "strategy": "token", "dynamic": True},
    }
    config = {
        "model_type": "qwen3_moe",
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "hidden_size": hidden,
        "moe_intermediate_size": inner,
        "num_hidden_layers": 2,
        "hidden_act": "silu",
        "norm_topk_prob": True,
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "config_groups": {"group_0": group},
            "ignore": ["re:.*layers\\.0\\..*", "re:.*gate$", "lm_head"],
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
