"""`tune lab`: the commands that judge the search."""

import typer

from blocktune.cli.lab import noise, record, rematch, replay, sweeps, untuned

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@app.callback()
def lab() -> None:
    """Judge the search by recorded sweeps and repeated timings.

    \b
    tune lab replay
    tune lab noise --seq 8192 --dim 64
    """


app.command("record")(record.record)
app.add_typer(sweeps.app, name="sweeps")
app.command("replay")(replay.replay)
app.command("calibrate")(untuned.calibrate)
app.command("noise")(noise.noise)
app.command("rematch")(rematch.rematch)
