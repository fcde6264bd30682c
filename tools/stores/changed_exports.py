"""Exports in which values were changed, taken away or put elsewhere."""

import copy
import json
import random
import sys
from pathlib import Path
from typing import Any

from blocktune.db.exchange.document import document_from
from blocktune.db.store import ResultStore
from blocktune.kernels.values.errors import BlocktuneError
from tests.support.stores.sample_records import sample_trials, winner

ODD_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**31, 2**63, 10**400, 1e308, -1e-308, "", "0", "nan", "x" * 5000, "\x1b[31m", "\ud800", "\0"),
    *([], {}, [[[[]]]], {"": {}}, [None] * 300, "2999-01-01T00:00:00+00:00", "'; drop table trial; --", "../../x"),
)
"""What stands in the place of a value."""


def imports(folder: Path, tried: int, seed: int) -> tuple[int, int, str]:
    """Exports with values that were changed, taken away or put elsewhere are imported: all of one or nothing."""
    dice, wrong, taken = random.Random(seed), 0, 0
    best = winner()
    text = json.dumps(document_from(best.device, [best], sample_trials(2)))
    with ResultStore.open(folder / "imports.db") as store:
        for _ in range(tried):
            document = json.loads(text)
            if dice.random() < 0.8:  # else nothing passes the checksums
                for row in document["bests"] + document["trials"]:
                    del row["checksum"]
            for _ in range(dice.choice((1, 1, 2, 5))):
                spoil(document, dice)
            try:
                store.import_json(document, trust=dice.random() < 0.5)
                taken += 1
            except BlocktuneError:
                pass
            except Exception as error:
                sys.stderr.write(f"{error!r:.300}\n")
                wrong += 1
        wrong += not store.health().sound
    return 0, wrong, f"{taken} were taken, all others refused"


def spoil(document: Any, dice: random.Random) -> None:
    """Change one value of a document, at any depth."""
    places: list[tuple[Any, Any]] = []
    open_ = [document]
    while open_:
        value = open_.pop()
        keys = value if isinstance(value, dict) else range(len(value))
        places += [(value, key) for key in keys]
        open_ += [value[key] for key in keys if isinstance(value[key], (dict, list))]
    holder, key = dice.choice(places)
    if dice.random() < 0.3 and isinstance(holder, dict):
        holder[dice.choice(("x" * 200, "\x1b]0;owned", "", str(key).upper()))] = holder.pop(key)
    else:
        holder[key] = copy.deepcopy(dice.choice((*ODD_VALUES, holder)))
