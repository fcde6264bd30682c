"""Tables of configs as a check of continuous integration: what must not be, as an exit code and as JUnit's XML."""

import re
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING
from xml.etree import ElementTree

from blocktune.kernels.values.errors import ConfigFlawError
from blocktune.kernels.values.text import counted

if TYPE_CHECKING:
    from blocktune.tuner.dry_run.config_row import Flaw
    from blocktune.tuner.dry_run.config_table import OfflineTable

_NOT_IN_XML = re.compile(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 has no form for, such as those by which compilers colour their messages."""

SHOWN = 5
"""Configs that a message names."""


def require_no_flaws(tables: "Iterable[OfflineTable]", kinds: "Collection[Flaw]") -> None:
    """Require that no config has a flaw of these kinds.

    Raises:
        ConfigFlawError: some have.
    """
    found = [
        f"{table.kernel} {row.label} on {table.device_name}: {words}"
        for table in tables
        for row, _, words in table.flawed(kinds)
    ]
    if found:
        more = f"; and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        raise ConfigFlawError(
            f"`--fail-on {','.join(kinds)}` allows no such config, but {counted(len(found), 'config')} "
            f"{'is' if len(found) == 1 else 'are'}: {'; '.join(found[:SHOWN])}{more}. Take them out of the list."
        )


def junit_text(tables: "Sequence[OfflineTable]", kinds: "Collection[Flaw]") -> str:
    """Return the configs as test cases in JUnit's XML, a suite for each table; a flaw of these kinds fails."""
    root = ElementTree.Element("testsuites", name="blocktune")
    for table in tables:
        failed = {row.number for row, _, _ in table.flawed(kinds)}
        counts = {"tests": str(len(table.rows)), "failures": str(len(failed))}
        suite = ElementTree.SubElement(root, "testsuite", {"name": table.title} | counts)
        for row in table.rows:
            case = ElementTree.SubElement(suite, "testcase", classname=table.kernel, name=row.label)
            for flaw, words in row.flaws.items():
                if flaw in kinds:
                    ElementTree.SubElement(case, "failure", type=str(flaw), message=words)
    ElementTree.indent(root)
    return _NOT_IN_XML.sub("", ElementTree.tostring(root, encoding="unicode", xml_declaration=True)) + "\n"
