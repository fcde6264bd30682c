"""`tune run --from-misses`: the shapes that the dispatcher was called with and had no measurement of."""

from typing import TYPE_CHECKING

from blocktune.cli.output.render import note
from blocktune.kernels.values.text import counted

if TYPE_CHECKING:
    from blocktune.kernels.hardware.device import DeviceSpec
    from blocktune.kernels.values.shape import AttentionShape
    from blocktune.runtime.store_reader.sources import ConfigSource


def missed_shapes(device: "DeviceSpec", db: str | None) -> tuple["AttentionShape", ...]:
    """Return the shapes that were missed on this device and have no measurement in the store or the package, most
    frequent first.

    Raises:
        UsageError: the counting is switched off.
        StoreError: the file of misses cannot be read.
    """
    from blocktune.cli.shared.stores import existing_store
    from blocktune.db.tables.location import StoreTarget
    from blocktune.kernels.files.variables import MISSES
    from blocktune.kernels.values.errors import UsageError
    from blocktune.runtime.selection.miss_file import miss_path, read_misses
    from blocktune.runtime.selection.misses import work_of
    from blocktune.runtime.store_reader.sources import JsonConfigs, LayeredConfigs, SqliteConfigs

    path = miss_path()
    if path is None:
        raise UsageError(
            f"`--from-misses` needs a file of misses, but {MISSES.name} switches it off. Name a file there."
        )
    with existing_store(db) as store:
        own: list[ConfigSource] = []
        if store is not None:
            place = StoreTarget.of(db).path
            own.append(store if place is None else SqliteConfigs(place))
        shapes = tuple(work_of(device, LayeredConfigs((*own, JsonConfigs())), read_misses(path)))
    note(f"{counted(len(shapes), 'shape')} to tune, missed on {device.name} according to {path}")
    return shapes
