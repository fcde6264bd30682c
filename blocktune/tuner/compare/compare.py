"""The use case: one shape, everybody who can compute it, in one interleaved run on the GPU that is here.

    comparison = compare(shape, store=store, device=current_device())

Who takes part: the stored winner (`tuned`; of a shape that has none, what its calls get all the same: `untuned`), the
kernel's `default`, the `paper`'s rule, the best stored config of every other kernel that was searched (by the kernel's
name), PyTorch's back ends (`cudnn`, `fa2`), FlashAttention-3 and -4 (`fa3`, `fa4`) where they are installed, for 8-bit
tensors our 16-bit default over the same numbers (`bfloat16`), and on request PyTorch's FlexAttention (`flex`),
functions of a file (`module:function`), `standard` attention and what stock autotune finds (`triton_autotune`). Each
result is checked against the reference before anything is timed; who fails or is missing stays in the comparison, with
the reason. Times are taken as tuner/measure/protocol.py says, in one of two regimes: `burst`, in which the card rests
before every round and stays cool, and `sustained`, in which it works without a break, as in training. Clock and power
of the whole measurement stand in the comparison.
"""

import time
from collections.abc import Collection, Mapping
from concurrent.futures import wait
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from blocktune.db.records.records import Best, Environment, Regime
from blocktune.db.store import ResultStore
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.kernels.registry import KERNELS, competing, get_kernel
from blocktune.kernels.values.config import KernelConfig, Origin
from blocktune.kernels.values.errors import NoFeasibleConfigError
from blocktune.kernels.values.shape import FP8, SHORT_DTYPES, AttentionShape, Causal, Direction
from blocktune.tuner.candidates.starting_configs import find_contenders
from blocktune.tuner.compare.flash_peers import FLASH_PEERS
from blocktune.tuner.compare.flex_peer import flex_compute
from blocktune.tuner.compare.line_up import LineUp
from blocktune.tuner.compare.peers import BACKENDS, standard_compute
from blocktune.tuner.compare.report import TUNED, UNTUNED, Comparison, Entry
from blocktune.tuner.compare.rivals_file import Rival
from blocktune.tuner.compare.sixteen_bits import SIXTEEN_BITS, sixteen_bit_compute, sixteen_bit_config, sixteen_bits
from blocktune.tuner.compare.stock_autotune import Bind
from blocktune.tuner.compile_server.background import Compiler
from blocktune.tuner.correctness.checks_of_shape import questions_of
from blocktune.tuner.correctness.memory import require_memory
from blocktune.tuner.measure.clock import Clock, CudaClock
from blocktune.tuner.measure.telemetry import GpuMonitor

BENCH_FORMAT, BENCH_SCHEMA = "blocktune-bench", 1


def compare(
    shape: AttentionShape,
    *,
    store: ResultStore,
    device: DeviceSpec,
    regime: Regime = Regime.BURST,
    compiler: Compiler | None = None,
    standard: bool = False,
    flex: bool = False,
    backends: Mapping[str, str] | None = None,
    rivals: Mapping[str, Rival] | None = None,
    seed: int = 0,
    clock: Clock | None = None,
    torch_device: str = "cuda",
    bind: Bind | None = None,
) -> Comparison:
    """Time everybody who computes a shape against each other.

    Args:
        shape: what is computed.
        store: holds the tuned config.
        device: the GPU that is here.
        regime: how warm the card is.
        compiler: compiles ahead for stock autotune, which takes part if this is given.
        standard: standard attention takes part, which needs memory for all scores.
        flex: PyTorch's FlexAttention takes part, which compiles for up to minutes.
        backends: PyTorch's back ends that take part, as members of `SDPBackend` by name; None is `BACKENDS`.
        rivals: further contenders by name.
        seed: of the inputs.
        clock: takes the times; None is a `CudaClock`.
        torch_device: where the tensors are.
        bind: makes a launcher of a config; None asks the config's kernel.

    Raises:
        NoFeasibleConfigError: the stored winner is not one that was measured with the present kernels.
        UsageError: the shape does not fit the device's memory.
    """

    started = time.monotonic()
    own = own_configs(store, device, shape)
    require_memory(shape, device)
    question, _ = questions_of(shape, device=torch_device, seed=seed)
    line_up = LineUp(shape, question, clock or CudaClock(), bind or _bind)
    line_up.invite_own(own)
    if shape.dtype == FP8:
        sixteen = sixteen_bit_config(shape, device)
        line_up.invite(Entry(name=SIXTEEN_BITS, config=sixteen), partial(sixteen_bit_compute, shape, question, sixteen))
    for name, backend in (BACKENDS if backends is None else backends).items():
        line_up.invite_torch(name, backend)
    for name, peer in FLASH_PEERS.items():
        line_up.invite(Entry(name=name), partial(peer.compute, shape, question))
    for name, rival in (rivals or {}).items():
        line_up.invite_rival(name, rival)
    if flex:
        line_up.invite(Entry(name="flex"), partial(flex_compute, shape, question))
    if standard:
        line_up.invite(Entry(name="standard"), partial(standard_compute, shape, device, question))
    if compiler is not None:
        contenders = find_contenders(shape, device, competing(), ())
        line_up.invite_stock_autotune(contenders, device.limits.cc, compiler)
    monitor = GpuMonitor(device.uuid, own_processes=1)
    rounds, load = line_up.time(regime, monitor)
    return Comparison(
        shape=shape,
        regime=regime,
        entries=line_up.timed_entries(rounds),
        rounds=len(rounds),
        seconds=time.monotonic() - started,
        load=load,
    )


def bench_document(device: DeviceSpec, environment: Environment, regime: Regime) -> dict[str, Any]:
    """Return a bench of this device, software and regime, as a file keeps it, without rows."""
    number = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    cudnn = number and f"{number // 10000}.{number // 100 % 100}.{number % 100}"
    return {
        "schema": BENCH_SCHEMA,
        "format": BENCH_FORMAT,
        "device": replace(device, uuid=None).to_json(),
        "environment": environment.to_json() | {"cudnn": cudnn, "peers": peer_versions()},
        "regime": str(regime),
        "kernels": sorted(KERNELS),
        "created_at": "",
        "commands": [],
        "rows": [],
    }


def peer_versions() -> dict[str, str]:
    """Return the versions of the peers that are packages of their own, by their names."""
    versions = {name: peer.version for name, peer in FLASH_PEERS.items()}
    return {name: version for name, version in versions.items() if version is not None}


def own_configs(store: ResultStore, device: DeviceSpec, shape: AttentionShape) -> dict[str, KernelConfig | None]:
    """Return our configs that take part, by their names; None for a rule that has no config for the shape.

    Raises:
        NoFeasibleConfigError: the stored winner is not one that was measured with the present kernels.
    """
    tuned = tuned_config(store, device, shape)
    contenders = find_contenders(shape, device, competing(), store.nearest(device, shape))
    own = {UNTUNED: contenders.untuned} if tuned is None else {TUNED: tuned}
    named = own | {"default": contenders.default, "paper": contenders.paper}
    return named | ({} if tuned is None else best_of_others(store, device, shape, tuned))


def compile_ahead(
    store: ResultStore, device: DeviceSpec, shapes: Collection[AttentionShape], compiler: Compiler
) -> None:
    """Compile our contenders of all shapes side by side, so that none compiles while the GPU waits for its turn.

    A config that does not compile is reported when it is its turn.
    """
    wanted = [(shape, config) for shape in shapes for config in own_configs(store, device, shape).values() if config]
    wanted += [(sixteen_bits(shape), sixteen_bit_config(shape, device)) for shape in shapes if shape.dtype == FP8]
    wait([compiler.submit(config.kernel, config, shape, device.limits.cc) for shape, config in dict.fromkeys(wanted)])


def tuned_config(store: ResultStore, device: DeviceSpec, shape: AttentionShape) -> KernelConfig | None:
    """Return the stored winner of a shape on a device; None where it was not tuned.

    Raises:
        NoFeasibleConfigError: the winner is not one that was measured with the kernels as they are.
    """
    best = store.best(device, shape)
    if best is None:
        return None
    if problem := _unusable(best):
        raise NoFeasibleConfigError(
            f"No winner of {shape.label} was measured on {device.name}: {problem}. Tune it again: {tune_command(shape)}"
        )
    return best.config


def best_of_others(
    store: ResultStore, device: DeviceSpec, shape: AttentionShape, tuned: KernelConfig
) -> dict[str, KernelConfig | None]:
    """Return the fastest stored config of every kernel but the winner's, by the kernel's name; of trials that ran with
    the kernels as they are, under the winner's regime. Historical kernels have the ladder instead."""
    best = store.best(device, shape)
    sources = {kernel.name: kernel.source_hash for kernel in competing() if kernel.name != tuned.kernel}
    fastest: dict[str, tuple[float, KernelConfig]] = {}
    for trial in store.trials(device, shape):
        name = trial.config.kernel
        if trial.time_us is None or sources.get(name) != trial.kernel_hash:
            continue
        if best is not None and trial.environment.regime is not best.environment.regime:
            continue  # cool times are shorter, whichever config they are of
        if name not in fastest or trial.time_us < fastest[name][0]:
            fastest[name] = trial.time_us, trial.config
    return {name: fastest[name][1] for name in sources if name in fastest}


def tune_command(shape: AttentionShape) -> str:
    """Return the command that tunes this shape."""
    words = f"tune run --seq {shape.seqlen_q} --dim {shape.head_dim} --batch {shape.batch} --heads {shape.num_heads}"
    words += "" if shape.group_size == 1 else f" --kv-heads {shape.num_heads_kv}"
    words += "" if shape.seqlen_k == shape.seqlen_q else f" --seq-k {shape.seqlen_k}"
    words += "" if shape.head_dim_v == shape.head_dim else f" --dim-v {shape.head_dim_v}"
    words += f" --direction {shape.direction}" if shape.direction is not Direction.FORWARD else ""
    words += f' --features "{shape.features.label}"' if shape.features else ""
    words += "" if shape.dtype == "bfloat16" else f" --dtype {SHORT_DTYPES[shape.dtype]}"
    return (
        words
        + {Causal.NONE: "", Causal.UPPER_LEFT: " --causal", Causal.LOWER_RIGHT: " --causal-lower-right"}[shape.causal]
    )


def _unusable(best: Best) -> str:
    if best.origin is not Origin.MEASURED:
        return f"the stored config is only {best.origin}"
    if best.kernel_hash != get_kernel(best.config.kernel).source_hash:
        return "the stored config was measured with another source of its kernel"
    return ""


def _bind(config: KernelConfig, shape: AttentionShape) -> Any:
    return get_kernel(config.kernel).bind(config, shape)
