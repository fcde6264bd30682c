"""`tune roofline`: the ceilings of a device, by the catalogue and as this very card reaches them."""

from typing import TYPE_CHECKING, Annotated

import typer

from blocktune.cli.output.render import note, percent, print_json, print_styled, print_table, say, terminal_width
from blocktune.cli.shared.options import AsJson, DeviceName
from blocktune.tuner.measure.device_choice import choose_device

if TYPE_CHECKING:
    from blocktune.tuner.profile.ceilings import Ceiling


def roofline(
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure them on the GPU here, which takes some seconds.")
    ] = False,
    device: DeviceName = None,
    as_json: AsJson = False,
) -> None:
    """Show the ceilings of a device, and the roofline they make.

    The ceilings are memory, L2, matrix products and exponentials. With --measure, a copy, reads from L2, a product of
    large matrices and a kernel of exponentials run here, and the fastest round of each is shown next to the catalogue's
    figure.

    \b
    tune roofline --device h200
    tune roofline --measure
    """
    from blocktune.cli.explain.roofline_plot import roofline_lines
    from blocktune.tuner.profile.ceilings import catalogue_ceilings, measured_ceilings

    spec = choose_device(device)
    ceilings = measured_ceilings(spec, note) if measure else catalogue_ceilings(spec)
    if as_json:
        print_json(
            {"device": spec.to_json(), "ceilings": {name: ceiling.to_json() for name, ceiling in ceilings.items()}}
        )
        return
    print_table(("ceiling", "catalogue", "measured", "share"), map(_row, ceilings.values()), title=spec.name)
    say("")
    print_styled(roofline_lines(ceilings, terminal_width()))
    ridge = ceilings["matrix"].known * 1e3 / ceilings["memory"].known
    say(
        f"\nBelow {ridge:,.0f} FLOP for every byte of device memory, memory is the ceiling; above it, the products are."
    )


def _row(ceiling: "Ceiling") -> tuple[str, ...]:
    measured = "-" if ceiling.measured is None else _value(ceiling.measured, ceiling.unit)
    return ceiling.title, _value(ceiling.catalogue, ceiling.unit), measured, percent(ceiling.share)


def _value(value: float, unit: str) -> str:
    return f"{value:,.4g} {unit}" if value < 1e4 else f"{value:,.0f} {unit}"
