"""`tune contribute`: what this GPU can tell those who do not have it, in ten minutes and one file."""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from blocktune.cli.output.json_files import writable, write_atomically
from blocktune.cli.output.render import note, print_json, say
from blocktune.cli.shared.options import AsJson
from blocktune.kernels.values.errors import VerificationError
from blocktune.kernels.values.text import counted

if TYPE_CHECKING:
    from blocktune.kernels.hardware.device import DeviceSpec
    from blocktune.tuner.contribute.contribution import Instruments

Key = Annotated[Path | None, typer.Option("--sign", metavar="KEY", help="Sign the file with this private Ed25519 key.")]
PublicKey = Annotated[
    Path | None, typer.Option("--verify", metavar="KEY", help="Check the file FILE with this public key instead.")
]


def contribute(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The JSON file to write.", callback=writable)],
    sign: Key = None,
    verify: PublicKey = None,
    as_json: AsJson = False,
) -> None:
    """Measure this GPU for those without it, in ten minutes.

    It compiles, checks all kernels, studies the noise, and times a dozen shapes of each direction next to PyTorch. The
    file names neither machine nor user; docs/guide/results.md says where to send it. It is complete after every part.
    If a kernel is wrong, the command ends with 7.

    \b
    tune contribute rtx4090.json
    tune contribute rtx4090.json --sign ~/.ssh/id_ed25519
    """
    if verify is not None:
        _verify(file, verify)
        note(f"{file} is as the owner of {verify} signed it")
        return
    from blocktune.db.records.records import Regime
    from blocktune.kernels.hardware.device import current_device
    from blocktune.tuner.contribute.contribution import contribute as contribute_results
    from blocktune.tuner.measure.environment import measuring_environment
    from blocktune.tuner.measure.telemetry import GpuMonitor

    device = current_device()
    save = _saver(file, sign)
    environment = measuring_environment(device, GpuMonitor(device.uuid), Regime.BURST)
    with _instruments(device) as instruments:
        document = contribute_results(device, environment, instruments, save=save, on_progress=note)
    if as_json:
        print_json(_summary(document) | {"file": str(file)})
    else:
        say("\n".join(_lines(document)))
        note(f"wrote {file}: please send it, as docs/guide/results.md says")
    _require_right(document)


def _saver(file: Path, key: Path | None) -> Callable[[dict[str, Any]], None]:
    """Return what writes the document, signed where there is a key, which is tried at once.

    Raises:
        UsageError: the key cannot sign.
    """
    from blocktune.kernels.files.signature import signed

    if key is not None:
        signed({}, "", key)

    def save(document: dict[str, Any]) -> None:
        kept = document if key is None else signed(document, document["sha256"], key)
        write_atomically(file, json.dumps(kept, indent=1, sort_keys=True, allow_nan=False) + "\n")

    return save


@contextmanager
def _instruments(device: "DeviceSpec") -> "Iterator[Instruments]":
    """Yield what works on a GPU that is here, which is locked meanwhile. No result of this machine's store takes part,
    so that the rows of all machines come about in one way."""
    from blocktune.db.store import ResultStore
    from blocktune.tuner.compare.compare import compare, own_configs
    from blocktune.tuner.compare.peers import ALL_BACKENDS
    from blocktune.tuner.compile_server.farm import CompileFarm
    from blocktune.tuner.contribute.contribution import Instruments
    from blocktune.tuner.contribute.fixed_shapes import fixed_shapes
    from blocktune.tuner.lab.noise_document import noise_document
    from blocktune.tuner.measure.clock import CudaClock
    from blocktune.tuner.measure.device_choice import visible
    from blocktune.tuner.measure.runner import GpuRunner
    from blocktune.tuner.measure.telemetry import gpu_lock

    checker = GpuRunner(fixed_shapes(device.limits)[0], environment=visible(device))
    with (
        tempfile.TemporaryDirectory() as folder,
        ResultStore.open(Path(folder, "contribution.db")) as store,
        gpu_lock(device.uuid, note),
        CompileFarm(need_code=True) as farm,
    ):

        def study(shape: Any, configs: Any, seconds: float) -> dict[str, Any]:
            checker.close()  # its process would count as another user of the GPU
            return noise_document(shape, device, configs, seconds, on_progress=note)

        try:
            yield Instruments(
                compiler=farm,
                checker=checker,
                own_configs=partial(own_configs, store, device),
                study=study,
                compare=partial(compare, store=store, device=device, backends=ALL_BACKENDS, clock=CudaClock()),
            )
        finally:
            checker.close()


def _verify(file: Path, key: Path) -> None:
    """Check that a contribution is as the owner of a key signed it.

    Raises:
        ImportRejectedError: it is no contribution, or was changed.
        StoreError: its signature is another one, or missing.
    """
    from blocktune.db.exchange.contribution import results_in_contribution
    from blocktune.db.exchange.document import load_document
    from blocktune.kernels.files.signature import require_signature

    document = load_document(file)
    results_in_contribution(document)
    require_signature(str(file), document, document["sha256"], key)


def _summary(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was found in numbers."""
    checked = document["conformance"]
    return {
        "compiled": sum(row["outcome"] == "ok" for row in document["compiled"]),
        "checked": len(checked),
        "right": sum(row["outcome"] == "ok" for row in checked),
        "timed": len(document["bench"]["rows"]),
        "left_out": document["left_out"],
        "seconds": document["seconds"],
    }


def _lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield what was found in words."""
    found, name = _summary(document), document["results"]["device"]["name"]
    yield f"{name}: {found['compiled']} of {counted(len(document['compiled']), 'config')} compiled"
    yield f"{found['right']} of {counted(found['checked'], 'small shape')} are right"
    yield f"{counted(found['timed'], 'shape')} timed next to PyTorch, in {found['seconds']:.0f} s in all"
    for part, reason in found["left_out"].items():
        yield f"left out: {part}: {reason}"


def _require_right(document: Mapping[str, Any]) -> None:
    """Check that no kernel failed.

    Raises:
        VerificationError: some did; the file has each with its error.
    """
    failed = sorted({row["kernel"] for row in document["conformance"] if row["outcome"] != "ok"})
    if failed:
        raise VerificationError(
            f"Some results of {', '.join(failed)} are wrong or missing on this GPU. The file says which: please send "
            "it."
        )
