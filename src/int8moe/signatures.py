"""Checks hook implementations against their specification, which pluggy does only in part. Imports no torch.

pluggy lets pass: a misspelt hook that nobody asks about, a missing marker, fewer or reordered arguments.
Each of them is a refusal here, naming the hook and the signature that is wanted.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable

from .errors import PluginLoadError
from .near_names import near_names

_MARK = "int8moe_impl"  # set by pluggy's HookimplMarker("int8moe")


def _hooks_of(spec: type) -> dict[str, tuple[str, ...]]:
    return {
        name: tuple(inspect.signature(function).parameters)[1:]
        for name, function in vars(spec).items()
        if inspect.isfunction(function) and hasattr(function, "int8moe_spec")
    }


def hook_names(spec: type) -> tuple[str, ...]:
    """Names of the hooks that a specification class defines."""
    return tuple(_hooks_of(spec))


def _signature(hook: str, hooks: dict[str, tuple[str, ...]]) -> str:
    return f"{hook}({', '.join(('self', *hooks[hook]))})"


def check_hooks(implementation: object, spec: type, *, required: Iterable[str], owner: str) -> None:
    """Refuse an implementation whose hooks are missing, misspelt, unmarked or mis-signed.

    Args:
        implementation: a module or an instance.
        spec: KernelProvider or FusedMoEExperts.
        required: hooks that have to be there.
        owner: how to name the implementation in the error.

    Raises:
        PluginLoadError: with the hook's name and the wanted signature.
    """
    hooks = _hooks_of(spec)
    marked: set[str] = set()
    for name in dir(implementation):
        if name.startswith("__"):
            continue
        function = getattr(implementation, name, None)
        options = getattr(function, _MARK, None)
        if not isinstance(options, dict):
            continue
        hook = options.get("specname") or name
        if hook not in hooks:
            near = near_names(hook, hooks, count=1, cutoff=0.4)
            hint = f"did you mean {_signature(near[0], hooks)}?" if near else f"the hooks are {', '.join(hooks)}"
            raise PluginLoadError(f"{owner}: {hook!r} is marked @hookimpl, but there is no such hook; {hint}")
        wanted = _signature(hook, hooks)
        if options.get("hookwrapper") or options.get("wrapper"):
            raise PluginLoadError(f"{owner}: {hook!r} is a hook wrapper; implement {wanted} itself")
        if hook in marked:
            raise PluginLoadError(f"{owner}: {hook!r} is implemented twice; keep one {wanted}")
        assert function is not None
        found = inspect.signature(function).parameters
        plain = all(
            p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and p.default is inspect.Parameter.empty
            for p in found.values()
        )
        if not plain or tuple(found) != hooks[hook]:
            raise PluginLoadError(
                f"{owner}: {hook!r} has the parameters ({', '.join(map(str, found.values()))}), "
                f"wanted is {wanted}, in that order, without defaults"
            )
        marked.add(hook)
    for hook in required:
        if hook in marked:
            continue
        wanted = _signature(hook, hooks)
        if callable(getattr(implementation, hook, None)):
            raise PluginLoadError(f"{owner}: {hook!r} is not marked @hookimpl; mark {wanted}")
        near = near_names(hook, [n for n in dir(implementation) if not n.startswith("_")], count=1, cutoff=0.7)
        found_text = f"; found {near[0]!r}" if near else ""
        raise PluginLoadError(f"{owner}: the required hook {hook!r} is missing{found_text}; implement {wanted}")
    for hook in set(hooks) - marked:
        if callable(getattr(implementation, hook, None)) and not inspect.isclass(implementation):
            raise PluginLoadError(
                f"{owner}: {hook!r} is not marked @hookimpl; mark {_signature(hook, hooks)}, or rename it"
            )
