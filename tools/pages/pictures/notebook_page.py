"""Runs the notebook of the examples, and writes it as a page: `python -m tools.pages.pictures.notebook_page`.

Each cell shows its last expression as a notebook does, by `_repr_html_`. Pictures become files next to the page.
"""

import ast
import base64
import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from blocktune.cli.output.json_files import write_atomically
from blocktune.db.store import ResultStore
from blocktune.kernels.files.variables import DB

NOTEBOOK = Path("examples") / "tour.ipynb"
PAGE = Path("docs") / "guide" / "notebook.md"
IMAGE = re.compile(r'<img alt="(?P<alt>[^"]*)" src="data:image/svg\+xml;base64,(?P<code>[^"]*)"/>')

Cell = dict[str, Any]


def execute(notebook: dict[str, Any]) -> dict[str, Any]:
    """Return a notebook with the outputs of its cells, which run in the working folder with a new database."""
    names: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        before, place = os.environ.get(DB.name), Path(folder, "tour.db")
        ResultStore.open(place).close()
        DB.set_to(str(place))
        try:
            cells = [_ran(cell, names) for cell in notebook["cells"]]
        finally:
            DB.set_to(before)
    return notebook | {"cells": cells}


def _ran(cell: Cell, names: dict[str, Any]) -> Cell:
    """Return a cell with what its last expression is; other cells as they are."""
    if cell["cell_type"] != "code":
        return cell
    *statements, last = ast.parse("".join(cell["source"])).body
    assert isinstance(last, ast.Expr)  # of every cell of the notebook
    exec(compile(ast.Module(statements, []), "cell", "exec"), names)
    value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    data = {"text/plain": _lines(repr(value))}
    if hasattr(value, "_repr_html_"):
        data["text/html"] = _lines(value._repr_html_())
    result = {"output_type": "execute_result", "execution_count": None, "metadata": {}, "data": data}
    return cell | {"outputs": [result]}


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def page_of(notebook: dict[str, Any]) -> str:
    """Return the notebook as a page; its pictures are those of `pictures_of`."""
    numbers = iter(range(1, 1000))

    def link(match: re.Match[str]) -> str:
        return f'<img alt="{match["alt"]}" src="pictures/notebook-{next(numbers)}.svg">'

    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        data = cell["outputs"][0]["data"]
        if "text/html" in data:
            shown = IMAGE.sub(link, _short("".join(data["text/html"])))
        else:
            shown = f"```text\n{''.join(data['text/plain'])}\n```"
        parts.append(f"<!-- cell {NOTEBOOK} -->\n{shown}\n<!-- /cell -->")
    return "\n\n".join(parts) + "\n"


def _short(html: str) -> str:
    """Return HTML in one line, without the styles of pandas and ours: the page has its own."""
    html = re.sub(r"<style.*?</style>|\n| (?:style|border|class)=\"[^\"]*\"", "", html, flags=re.DOTALL)
    return re.sub(r">\s+<", "><", html)


def pictures_of(notebook: dict[str, Any]) -> Iterator[str]:
    """Yield the pictures of the outputs, as SVG."""
    for cell in notebook["cells"]:
        for output in cell.get("outputs", ()):
            for match in IMAGE.finditer("".join(output["data"].get("text/html", ()))):
                yield base64.b64decode(match["code"]).decode()


def main() -> None:
    """Run the notebook, and write it, its page and its pictures."""
    notebook = execute(json.loads(NOTEBOOK.read_text()))
    write_atomically(NOTEBOOK, json.dumps(notebook, indent=1, ensure_ascii=False, sort_keys=True) + "\n")
    write_atomically(PAGE, page_of(notebook))
    for number, picture in enumerate(pictures_of(notebook), 1):
        write_atomically(PAGE.parent / "pictures" / f"notebook-{number}.svg", picture)


if __name__ == "__main__":
    main()
