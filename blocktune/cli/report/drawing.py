"""vl-convert in a process of its own: its JavaScript engine reserves tens of GiB of addresses, or aborts.

    script = javascript_bundle()                      # Vega, Vega-Lite and Vega-Embed
    image = svg(spec, {"low": 0.0})                   # a chart of Vega-Lite

The process is this module, which reads what it shall do as JSON and prints the text.
"""

import json
import resource
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from blocktune.kernels.values.errors import UsageError
from blocktune.tuner.compile_server.client import worker_environment

Spec = Mapping[str, Any]


def javascript_bundle() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script.

    Raises:
        UsageError: vl-convert cannot run here.
    """
    return _draw_in_process({})


def svg(spec: Spec, signals: Mapping[str, float]) -> str:
    """Return a chart as a document of SVG.

    Args:
        spec: of Vega-Lite.
        signals: values of its parameters, by name.

    Raises:
        UsageError: vl-convert cannot run here.
    """
    return _draw_in_process({"spec": spec, "signals": signals})


def _draw_in_process(task: Mapping[str, Any]) -> str:
    command = [sys.executable, "-P", "-m", "blocktune.cli.report.drawing"]
    environment = worker_environment() | {"PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        command, input=json.dumps(task), env=environment, capture_output=True, encoding="utf-8", check=False
    )
    if done.returncode:
        ending = f"signal {-done.returncode}" if done.returncode < 0 else f"{done.stderr.strip()[-200:]!r}"
        raise UsageError(f"Charts need vl-convert, but its process ended with {ending}. {_way_out()}")
    return done.stdout


def _way_out() -> str:
    """Return what may help: an engine that the system has no addresses for ends by a signal."""
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most == resource.RLIM_INFINITY:
        return 'Install it again: pip install --force-reinstall "blocktune[report]"'
    return (
        f"Its JavaScript engine reserves tens of GiB of addresses, but this process may have {most / 2**30:.1f} GiB. "
        "Raise that limit: ulimit -v unlimited"
    )


def _text_of(task: Mapping[str, Any]) -> str:
    import vl_convert

    if "spec" not in task:
        bundle: str = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # its stub asks for what has a default
        return bundle
    vega: Any = vl_convert.vegalite_to_vega(json.dumps(task["spec"]))
    for signal in vega.get("signals", ()):
        signal["value"] = task["signals"].get(signal["name"], signal.get("value"))
    image: str = vl_convert.vega_to_svg(vega)
    return image


if __name__ == "__main__":
    sys.stdout.write(_text_of(json.load(sys.stdin)))
