"""The software that a measurement depends on, as found on this machine."""

from importlib.metadata import version

from blocktune.db.records.records import Environment, Regime
from blocktune.kernels.hardware.device import DeviceSpec
from blocktune.tuner.compile.compiler import ptxas_version
from blocktune.tuner.measure.protocol import PROTOCOL_VERSION
from blocktune.tuner.measure.telemetry import GpuMonitor, driver_version


def measuring_environment(device: DeviceSpec, monitor: GpuMonitor, regime: Regime = Regime.SUSTAINED) -> Environment:
    """The environment of times taken on a present GPU."""
    import torch

    return Environment(
        triton=version("triton"),
        ptxas=ptxas_version(device.limits.cc),
        torch=version("torch"),
        cuda=torch.version.cuda or "",
        driver=driver_version(),
        protocol=PROTOCOL_VERSION,
        power_limit_w=monitor.power_limit_w,
        regime=regime,
    )


def predicting_environment(device: DeviceSpec) -> Environment:
    """The environment of predictions: compilers only, no driver, no GPU."""
    return Environment(
        triton=version("triton"),
        ptxas=ptxas_version(device.limits.cc),
        torch=version("torch"),
        protocol=PROTOCOL_VERSION,
    )
