"""The checks of `tune doctor`: one function per topic, each returning findings."""

import os
import platform
import shutil
import sqlite3
import sysconfig
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from blocktune.cli.explain.findings import DoctorFinding, Level
from blocktune.cli.explain.store_checks import store_findings, triton_cache
from blocktune.cli.shared.tune_command import OURS, RAY, owner, script_owner, tune_commands
from blocktune.kernels.files.variables import VARIABLES, unknown_names

TRITON_VARIABLES: Mapping[str, str] = {
    "TRITON_INTERPRET": "kernels run in Python on the CPU, thousands of times slower; no time is a GPU's",
    "TRITON_KERNEL_OVERRIDE": "kernels are replaced by files of the override folder",
    "TRITON_OVERRIDE_ARCH": "kernels are compiled for another architecture than the GPU's",
    "TRITON_ALWAYS_COMPILE": "nothing is taken from Triton's cache, so every start compiles again",
    "TRITON_PTXAS_PATH": "another ptxas assembles the kernels; registers and times differ from the bundled one's",
    "TRITON_PTXAS_BLACKWELL_PATH": "another ptxas assembles kernels for Blackwell",
    "TRITON_DEFAULT_FP_FUSION": "multiply-adds may be left unfused: slower and rounded otherwise",
    "TRITON_F32_DEFAULT": "float32 products use another precision, which changes times and results",
    "TRITON_ENABLE_ASAN": "kernels carry an address sanitizer and are slow",
    "TRITON_DEBUG": "kernels carry assertions",
    "TRITON_INSTRUMENTATION_MODE": "kernels carry instrumentation",
    "DISABLE_PTXAS_OPT": "ptxas does not optimise",
    "DISABLE_LLVM_OPT": "LLVM passes are switched off",
    "PTXAS_OPTIONS": "ptxas gets options that the stored results did not have",
    "CUDA_LAUNCH_BLOCKING": "every launch waits for the kernel, which hides nothing and slows all",
}
"""Variables of the environment that change which code runs or how fast, with what follows from each."""

WAL_BUG_FIRST, WAL_BUG_LAST = (3, 7, 0), (3, 51, 2)
"""SQLite versions with the WAL-reset bug, by sqlite.org/wal.html; distributions may have backported the fix."""


def examine(db: str | None) -> tuple[DoctorFinding, ...]:
    """Return everything that the doctor knows about this machine, the database at `db` and the GPUs."""
    machine = (*_python(), *_tune_command(), *_gpus(), *_toolchain())
    machine += (*_variables(os.environ), *triton_cache(os.environ), *_own_variables(), *_incidents())
    return (*machine, *_sqlite(), *store_findings(db))


def _python() -> Iterator[DoctorFinding]:
    for name in ("blocktune", "torch", "triton", "optuna", "sqlalchemy"):
        try:
            yield DoctorFinding(name=name, value=metadata.version(name))
        except metadata.PackageNotFoundError:
            yield DoctorFinding(
                name=name,
                value="not installed",
                level=Level.PROBLEM,
                meaning="blocktune needs it.",
                fix="Install blocktune again with pip, which brings it.",
            )
    yield DoctorFinding(name="python", value=platform.python_version())


def _tune_command() -> Iterator[DoctorFinding]:
    """Yield who has the command `tune` where it is not ours alone, or its script is missing."""
    commands, folder = tune_commands(), Path(sysconfig.get_path("scripts"))
    others = [each for each in commands if owner(each) not in (OURS, RAY)]
    holder = script_owner(commands, folder)
    holds_it = owner(holder) if holder is not None else "missing"
    if not (folder / OURS).exists() or (holds_it == OURS and not others):
        return
    names = " and ".join(owner(each) for each in commands if owner(each) != OURS)
    written = f"The command is also in {names}, and the package that is installed last writes it."
    removed = "pip removed it with another package that had it, too."
    yield DoctorFinding(
        name="command tune",
        value=holds_it,
        level=Level.WARNING,
        meaning=written if names else removed,
        fix="Type `blocktune`. To write `tune` again: pip install --force-reinstall --no-deps blocktune",
    )


def _gpus() -> Iterator[DoctorFinding]:
    from blocktune.kernels.hardware.device import present_devices
    from blocktune.kernels.hardware.driver import read_driver

    report = read_driver()
    if report.cuda_version is not None:
        yield DoctorFinding(name="CUDA of the driver", value=".".join(map(str, report.cuda_version)))
    if not report.devices:
        yield DoctorFinding(
            name="GPU",
            value="none",
            level=Level.WARNING,
            meaning=f"{report.problem} Nothing can be measured here; `tune run` predicts instead.",
            fix="Run it on a machine with an NVIDIA GPU to measure, or name a device to predict for: --device h200",
        )
        return
    for device in present_devices():
        value = f"{device.name}, compute capability {device.limits.name}, {device.num_sms} SMs"
        yield DoctorFinding(name="GPU", value=value)
        yield from _state(device.uuid)
    yield from _torch_sees_the_gpu()


THROTTLING: Mapping[int, tuple[str, str]] = {
    0x02: ("clocks are set by an application", "Unless you mean it: nvidia-smi --reset-applications-clocks"),
    0x04: ("the power limit lowers the clocks", "Times are those of this power limit; they are stored with it."),
    0x08: ("the hardware slows itself down", "Look at cooling and power supply; times taken now mislead."),
    0x20: ("software lowers the clocks because of heat", "Let it cool, or fix the cooling, then tune."),
    0x40: ("the hardware lowers the clocks because of heat", "Let it cool, or fix the cooling, then tune."),
    0x80: ("the power supply asks for lower clocks", "Look at the power supply; times taken now mislead."),
}
"""Bits of NVML's clock event reasons that change times, with what each means and what to do."""


def _state(uuid: str | None) -> Iterator[DoctorFinding]:
    from blocktune.kernels.hardware.nvml import driver_version
    from blocktune.tuner.measure.telemetry import GpuMonitor

    if driver_version():
        yield DoctorFinding(name="driver", value=driver_version())
    now = GpuMonitor(uuid).sample()
    facts = {"MHz": now.sm_clock_mhz, "MHz memory": now.memory_clock_mhz, "°C": now.temperature_c, "W": now.power_w}
    known = [f"{value:.0f} {unit}" for unit, value in facts.items() if value is not None]
    yield DoctorFinding(name="GPU state", value=", ".join(known) or "unknown: NVML does not answer")
    for bit, (meaning, fix) in THROTTLING.items():
        if (now.throttle_reasons or 0) & bit:
            yield DoctorFinding(
                name="GPU clocks", value="lowered", level=Level.WARNING, meaning=f"Now {meaning}.", fix=fix
            )
    if now.other_processes:
        yield DoctorFinding(
            name="GPU users",
            value=f"{now.other_processes} other processes",
            level=Level.WARNING,
            meaning="Other programs use this GPU; they take time and memory from what is measured.",
            fix="Tune when the GPU is free (nvidia-smi lists its users).",
        )


def _torch_sees_the_gpu() -> Iterator[DoctorFinding]:
    import torch

    if torch.cuda.is_available():
        yield DoctorFinding(name="CUDA of torch", value=str(torch.version.cuda))
        return
    yield DoctorFinding(
        name="CUDA of torch",
        value=str(torch.version.cuda),
        level=Level.PROBLEM,
        meaning="The driver has a GPU, but this torch cannot use it: it is a CPU build, or newer than the driver.",
        fix="Install the torch build that matches the driver's CUDA, see https://pytorch.org/get-started/locally",
    )


def _toolchain() -> Iterator[DoctorFinding]:
    from blocktune.kernels.hardware.device import present_devices
    from blocktune.tuner.compile.compiler import ptxas_version

    present = present_devices()
    yield DoctorFinding(name="ptxas", value=ptxas_version(present[0].limits.cc if present else (9, 0)))
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is not None:
        yield DoctorFinding(name="C compiler", value=compiler)
        return
    yield DoctorFinding(
        name="C compiler",
        value="none",
        level=Level.WARNING,
        meaning="Triton builds the launcher of a kernel with a C compiler, so no kernel can run on a GPU here.",
        fix="Install gcc or clang, or name one by the variable CC.",
    )


def _variables(environment: Mapping[str, str]) -> Iterator[DoctorFinding]:
    for name, consequence in TRITON_VARIABLES.items():
        if environment.get(name):
            yield DoctorFinding(
                name=name,
                value=environment[name],
                level=Level.WARNING,
                meaning=f"With this variable {consequence}.",
                fix=f"Unless you mean it: unset {name}",
            )


def _own_variables() -> Iterator[DoctorFinding]:
    for variable in VARIABLES.values():
        problem = variable.problem()
        if problem is not None:
            fix = f"Set it to {variable.values}, or unset it."
            yield DoctorFinding(
                name=variable.name, value=variable.text(), level=Level.WARNING, meaning=problem, fix=fix
            )
    for name in unknown_names():
        yield DoctorFinding(
            name=name,
            value="unknown",
            level=Level.WARNING,
            meaning="blocktune reads no variable of this name.",
            fix=f"Correct or unset it. The variables are {', '.join(VARIABLES)}.",
        )


def _incidents() -> Iterator[DoctorFinding]:
    """Yield the calls that PyTorch computed since blocktune had failed."""
    from blocktune.kernels.files.incidents import incidents_path, stored_incidents

    stored = stored_incidents()
    if stored:
        last = stored[-1]
        yield DoctorFinding(
            name="incidents",
            value=f"{len(stored)}, the last at {last.time}",
            level=Level.WARNING,
            meaning=f"PyTorch computed calls, since blocktune failed. The last: {last.error}, for {last.shape}.",
            fix=f"Please report it. Remove {incidents_path()} when it is fixed.",
        )


def _sqlite() -> Iterator[DoctorFinding]:
    if not WAL_BUG_FIRST <= sqlite3.sqlite_version_info <= WAL_BUG_LAST:
        yield DoctorFinding(name="SQLite", value=sqlite3.sqlite_version)
        return
    yield DoctorFinding(
        name="SQLite",
        value=sqlite3.sqlite_version,
        level=Level.WARNING,
        meaning=(
            "SQLite 3.7.0 to 3.51.2 has a rare bug by which two connections that write and checkpoint one WAL database "
            "at the same moment can damage it. Your distribution may have fixed it without changing the version number."
        ),
        fix="Keep an export of results that matter (tune export), or use a Python with SQLite 3.51.3 or newer.",
    )
