"""The tables of a ladder's document."""

from collections.abc import Mapping
from typing import Any

from blocktune.cli.explain.ladder_file import HEADER, software_of, step_cells
from blocktune.kernels.values.shape import AttentionShape
from tools.pages.document_tables import commit_sentence, markdown_table

WORDS = ("step", "config", "limited by", "tensor cores")
"""Columns that hold words."""


def ladder_tables(document: Mapping[str, Any]) -> str:
    """Return the tables of a document, with where they come from and why each step differs from the one before."""
    return "\n\n".join([_caption(document), *(_section(row) for row in document["rows"])])


def _caption(document: Mapping[str, Any]) -> str:
    commands = " and ".join(f"`{command}`" for command in document["commands"])
    measured = all(row["origin"] == "measured" for row in document["rows"])
    how = (
        "All steps were checked first and timed in turns in one run"
        if measured
        else "Nothing was measured: all times are predicted"
    )
    return (
        f"{'Measured' if measured else 'Predicted'} for {document['device']['name']} on {document['created_at'][:10]} "
        f"({software_of(document)}), by {commands}. {how}; the bytes are counted by the model, with all keys that L2 "
        f"can keep.{commit_sentence(row.get('commit') for row in document['rows'])}"
    )


def _section(row: Mapping[str, Any]) -> str:
    flops = AttentionShape.from_json(row["shape"]).flops
    cells = [step_cells(step, flops) for step in row["steps"]]
    kept = [place for place in range(len(HEADER)) if any(line[place] != "-" for line in cells)]
    header, *lines = ([line[place] for place in kept] for line in (HEADER, *cells))
    table = markdown_table(header, lines, words=[place for place, name in enumerate(header) if name in WORDS])
    notes = [f"- {step['name']}: {_note(step)}" for step in row["steps"]]
    return f"{row['label']}:\n\n{table}\n\n" + "\n".join(notes)


def _note(step: Mapping[str, Any]) -> str:
    words = f"{step['idea']}."
    words += f" By the models: {step['why']}." if step["why"] else ""
    return f"{words} Not run: {step['problem']}" if step["problem"] else words
