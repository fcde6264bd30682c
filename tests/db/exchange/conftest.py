"""A document of results."""

import json
from dataclasses import replace
from typing import Any

import pytest

from blocktune.db.exchange.document import document_from
from blocktune.db.records.records import Best, Outcome, Trial

Document = dict[str, Any]


@pytest.fixture(scope="session")
def document(best: Best, trial: Trial) -> Document:
    """A document with one winner and two trials."""
    failed = replace(
        trial, config=replace(trial.config, num_stages=4), outcome=Outcome.RUN_ERROR, time_us=None, resources=None
    )
    return json.loads(json.dumps(document_from(best.device, [best], [trial, failed])))
