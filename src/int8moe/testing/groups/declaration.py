"""Declaration: the provider is light, the hooks are right, and the kernel does what it declares."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ...contracts import ACTIVATIONS, FEATURES, HIDDEN_DTYPES, NUMERICS_VERSION, PLUGIN_API_VERSION, WeightLayout
from ...hookspecs import REQUIRED_HOOKS, FusedMoEExperts
from ...host import this_host
from ...listing import list_kernels
from ...signatures import hook_names
from ..case import Case, Grid, skip
from ..makers import make_experts
from ..target import Target

_SIZES = (64, 48, 128, 256, 512, 1024, 100)

_LISTING = """
import json, sys
from int8moe import listing
names = [row.name for row in listing.list_kernels()]
plugins = [(p.name, p.state, p.error) for p in listing.list_plugins()]
heavy = sorted({"torch", "numpy"} & set(sys.modules))
print(json.dumps({"names": names, "plugins": plugins, "heavy": heavy}))
"""


def python(code: str, *arguments: str, timeout: float = 600, **environment: str) -> str:
    """Run Python code in a process of its own that finds what this one finds; return its stdout."""
    paths = os.pathsep.join(str(Path(p).resolve()) for p in sys.path if p)
    run = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert run.returncode == 0, f"a fresh process ended with {run.returncode}: {run.stderr.strip()[-2000:]}"
    return run.stdout


def _torch_free(target: Target) -> None:
    """Listing kernels with this plugin alone imports neither torch nor numpy."""
    if target.live:
        skip("registered live: no other process can discover it")
    found = json.loads(python(_LISTING, INT8MOE_PLUGINS=target.spec.namespace, INT8MOE_STRICT="0"))
    assert target.name in found["names"], f"a fresh process lists {found['names']}; plugins: {found['plugins']}"
    assert not found["heavy"], f"declaring kernels imports {', '.join(found['heavy'])}; do that in the kernel's module"


def _listed(target: Target) -> None:
    row = next(row for row in list_kernels() if row.name == target.name)
    assert row.available, f"list_kernels says unavailable: {row.reason}"
    assert row.layout == target.spec.layout
    assert row.priority == target.spec.priority


def _spec(target: Target) -> None:
    spec = target.spec
    assert spec.api_version == PLUGIN_API_VERSION, f"api_version {spec.api_version}, the core has {PLUGIN_API_VERSION}"
    assert spec.numerics.version == NUMERICS_VERSION, f"numerics version {spec.numerics.version}"
    for field, known in (("activations", ACTIVATIONS), ("dtypes", HIDDEN_DTYPES), ("features", FEATURES)):
        values = getattr(spec, field)
        assert len(set(values)) == len(values), f"{field} repeats a value: {values}"
        assert not set(values) - set(known), f"{field} has unknown words {set(values) - set(known)}; known: {known}"
    assert spec.activations, "no activation is declared"
    assert spec.dtypes, "no dtype is declared"
    assert "w8a8" in spec.schemes, f"schemes {spec.schemes} lack w8a8"
    assert spec.layout, "the layout has no name; a kernel that packs nothing says canonical"
    ungated = [a for a in spec.activations if a.endswith("_no_mul")]
    assert not ungated or "no_gate" in spec.features, f"{ungated} are declared, but not the feature no_gate"
    assert all(words and all(words) for words in spec.isa), f"isa {spec.isa} has an empty feature set or word"
    low, high = (0, 0) if spec.namespace == "reference" else (1, 100)
    assert low <= spec.priority <= high, f"priority {spec.priority}; 0 is the reference's"


def _hooks(target: Target) -> None:
    """Every hook has exactly the parameters of its specification; the kernel binds and passes its self-test."""
    implementation = target.bound.implementation
    for hook in hook_names(FusedMoEExperts):
        function = getattr(implementation, hook, None)
        if function is None:
            assert hook not in REQUIRED_HOOKS, f"the required hook {hook} is missing"
            continue
        wanted = tuple(inspect.signature(getattr(FusedMoEExperts, hook)).parameters)[1:]
        found = tuple(inspect.signature(function).parameters)
        assert found == wanted, f"{hook}{found}, wanted is {wanted}"
        assert hasattr(function, "int8moe_impl"), f"{hook} is not marked @hookimpl"


def _layout(target: Target) -> None:
    """Packing returns the layout that the spec states, in the kernel's namespace or the canonical one."""
    config = target.config()
    layer = target.layer(config, make_experts(config))
    layout = layer.weight_layout
    assert isinstance(layout, WeightLayout), f"packing gave {layout!r}"
    assert layout.name == target.spec.layout, f"packing gave {layout.name!r}, the spec states {target.spec.layout!r}"
    assert layout.is_canonical or layout.namespace == target.spec.namespace, f"layout {layout.tag} is somebody else's"
    assert layout.numerics_version == NUMERICS_VERSION, f"layout {layout.tag}"
    if layout.nbytes is not None and layout.name != "canonical":
        # int8 needs a byte a weight; fewer would be another format.
        weights = sum(t.numel() for t in make_experts(config).tensors().values() if t.dtype == torch.int8)
        assert layout.nbytes >= weights, f"nbytes {layout.nbytes} is below the {weights} bytes of the weights"
        held = sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in layer.buffers()}.values())
        assert layout.nbytes <= held, f"nbytes {layout.nbytes} is above the {held} bytes of the layer's tensors"


def _serves(target: Target) -> None:
    """Each declared activation, dtype and feature is served for at least one usual shape."""
    bound, host = target.bound, this_host()

    def served(**fields: Any) -> str | None:
        reason = None
        for size in _SIZES:
            shape = {"num_experts": 8, "top_k": 1, "hidden_size": size, "intermediate_size": size}
            reason = bound.refusal(target.config(**(shape | fields)), host)
            if reason is None:
                return None
        return reason

    questions: list[dict[str, Any]] = [{"activation": a, "has_bias": False} for a in target.activations]
    questions += [{"hidden_dtype": d} for d in target.spec.dtypes]
    flags = {"bias": "has_bias", "apply_router_weight_on_input": "apply_router_weight_on_input"}
    questions += [{flag: True} for feature, flag in flags.items() if feature in target.spec.features]
    if "expert_map" in target.spec.features:
        questions.append({"has_expert_map": True, "num_local_experts": 4})
    for fields in questions:
        reason = served(**fields)
        assert reason is None, f"{fields} is declared, yet refused at every size of {_SIZES}: {reason}"


def _stateless(target: Target) -> None:
    """Two layers share the one kernel object, and it holds no tensors."""
    config = target.config()
    first, second = (target.layer(config, make_experts(config, seed=s)) for s in (1, 2))
    assert first.kernel is second.kernel, "a kernel is one object per process"
    held = [name for name, value in vars(target.bound.implementation).items() if isinstance(value, torch.Tensor)]
    assert not held, f"the kernel object keeps tensors of a layer: {held}"


def cases(grid: Grid) -> Iterator[Case]:
    """Make the cases; the grid makes no difference."""
    checks: dict[str, Callable[[Target], None]] = {
        "torch-free": _torch_free,
        "listed": _listed,
        "spec": _spec,
        "hooks": _hooks,
        "layout": _layout,
        "serves-what-it-declares": _serves,
        "stateless": _stateless,
    }
    for name, run in checks.items():
        yield Case("declaration", name, run)
