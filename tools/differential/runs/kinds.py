"""What failures have in common, so that a report names a fault once."""

import re
from collections.abc import Mapping
from typing import Any

MESSAGE_CHARACTERS = 100

SIDE_AT_LIMIT = 2**30
LARGE_CAP = 1e3


def kind_of(record: Mapping[str, Any]) -> str:
    """What a failure is about: how it ended, and what was said; without a message the function, what is unusual about
    the case, and which tensors are wrong."""
    case, said = record["case"], error_kind(record)
    if record.get("message"):
        return f"{record['verdict']}: {said}"
    return ", ".join(filter(None, (f"{record['verdict']} {case['kind']['entry']}", *unusual(case), said)))


def unusual(case: Mapping[str, Any]) -> list[str]:
    """What of a case has led to faults before."""
    kind, window, mode = case["kind"], case.get("window", (-1, -1)), str(case.get("mode", "eager"))
    present = {
        mode: mode != "eager",
        "gradients": kind.get("gradients", False),
        "window at a limit": max(window) >= SIDE_AT_LIMIT,
        f"mask of {case.get('hides', '')}": "hides" in case,
        f"{case.get('stray')} in a mask": "stray" in case,
        "large soft cap": case.get("softcap", 0.0) >= LARGE_CAP,
        "scale <= 0": case.get("scale", 1.0) <= 0.0,
        "numbers apart": case.get("apart", False),
        "sliced cache": case.get("sliced", False),
        "appended keys": case.get("appended", 0) > 0,
        "shared pages": case.get("shared", False),
        "unwritten part": case.get("unwritten", False),
        str(case.get("values")): case.get("values") in ("inf", "nan"),
    }
    return [name for name, is_there in present.items() if is_there]


def error_kind(record: Mapping[str, Any]) -> str:
    """The message without its numbers, or which tensors were wrong."""
    if record.get("message"):
        return re.sub(r"-?\d+", "N", record["message"].splitlines()[0])[:MESSAGE_CHARACTERS]
    return "/".join(sorted({each["name"] for each in record.get("comparisons", ())}))
