"""What became of each plugin."""

from __future__ import annotations

from .discovery import Discovery, PluginReading
from .finding import Finding, note, ok, problem
from .mends import editable_folder, leave_out, reinstall
from .outcome import without_import_frames

CHECK = "plugins"


def check(discovery: Discovery) -> list[Finding]:
    """States of all plugins, with the tracebacks of those that failed."""
    from ..contracts import NUMERICS_VERSION, PLUGIN_API_VERSION

    findings = [ok(CHECK, f"this core has plugin API {PLUGIN_API_VERSION} and numerics {NUMERICS_VERSION}")]
    for ended in discovery.ended_plugins:
        text = f"plugin {ended.name!r} of {ended.distribution}: the process that loaded it {ended.ended}"
        findings.append(problem(CHECK, text, _mend(ended.name, ended.distribution), ended.stderr))
    left_out = {plugin.name for plugin in discovery.ended_plugins}
    findings += [
        _state(plugin, discovery)
        for plugin in discovery.plugins
        if not (plugin.state == "blocked" and plugin.name in left_out)
    ]
    outcome = discovery.outcome
    if outcome.last("plugins") is None:
        text = f"the plugins cannot be read: the process that loaded them {outcome.how_it_ended}"
        findings.append(problem(CHECK, text, reinstall("int8moe"), outcome.stderr))
    elif outcome.ended:
        text = f"the process that loaded the plugins did its work, but then {outcome.ended}"
        mend = "find the plugin by leaving one out at a time: INT8MOE_DISABLE_PLUGINS=NAME int8moe doctor"
        findings.append(problem(CHECK, text, mend, outcome.stderr))
    return findings


def _state(plugin: PluginReading, discovery: Discovery) -> Finding:
    who = f"plugin {plugin.name!r} of {plugin.distribution} {plugin.version}".rstrip()
    text = f"{who} is {plugin.state}: {plugin.error}"
    if plugin.state == "loaded":
        return ok(CHECK, f"{who} is loaded: {plugin.num_kernels} kernel{'' if plugin.num_kernels == 1 else 's'}")
    if plugin.state == "blocked":
        return note(CHECK, text)
    if plugin.state == "duplicate":
        again = any((row.name, row.value, row.state) == (plugin.name, plugin.value, "loaded")
                    for row in discovery.plugins)  # fmt: skip
        mend = f"pip uninstall {plugin.distribution}"
        return note(CHECK, text, mend) if again else problem(CHECK, text, f"{mend} (or the other one)")
    trace = without_import_frames(plugin.traceback)
    if plugin.state == "incompatible":
        mend = (
            f"install an int8moe and a {plugin.distribution} that fit each other, or leave it out: "
            f"{leave_out(plugin.name)}"
        )
        return problem(CHECK, text, mend, trace)
    return problem(CHECK, text, _mend(plugin.name, plugin.distribution), trace)


def _mend(name: str, distribution: str) -> str:
    folder = editable_folder(distribution)
    again = reinstall(distribution) if folder is None else f"mend its source in {folder} and {reinstall(distribution)}"
    return f"{again}, or leave it out: {leave_out(name)}"
