"""Ranks that call attention of distributed tensors: distributed_tensors FOLDER RANKS. Prints what each finds."""

import json
import os
import sys
from pathlib import Path

from tests.support.ranks.dtensor_calls import compare
from tools.ranks.shared_attention import begin_play


def main(folder: Path, ranks: int) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sys.stdout.write(json.dumps(begin_play("ranks", (ranks, compare), folder)()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
