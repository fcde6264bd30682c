"""What people read of the project is in plain words: its documents, its comments, its docstrings and its messages."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
AVOIDED = (
    *("none such", "so many", "that is none", "nobody", "somebody", "people's", "anew", "told", "asked"),
    *("beside", "behind", "mend", "mends", "mended", "hungry", "hungrier", "hungriest"),
    *("by turns", "seldom", "costs itself", "is none of", "in the place of", "draws lots", "as it were"),
    *("for want of", "in the mean", "to be had", "the long way", "the one of old"),
)
"""Words that stop a reader. "This many", "no one", "another user", "your", "again", "shown", "requested", "next to",
"after", "fix", "needs most", "in turns", "rarely", "affects no other", "is not one of", "instead of", "for lack of",
"on average", "available", "the slow path", "the earlier one" say the same."""
COUNTED, UNITS = (
    "once|warps|blocks|seconds|file|object|trials|queries|FLOP|wavefronts",
    "SM|block|launch|shape|device|line|(?:key |query )?tile|second|byte|head|load",
)
PER = f"(?:{COUNTED}) an? (?:{UNITS})"
"""Where "per" says it: once a launch, warps a block."""
PATTERN = re.compile(rf"\b(?:{'|'.join(AVOIDED)}|{PER})\b".replace(" ", r"(?: |\n *)"), re.IGNORECASE)
NAMES = re.compile(r"`\w+`|^ *\w+(?=:)|that is None", re.MULTILINE)
"""Parts of a sentence that belong to the code: quoted names, and fields that a docstring lists."""
MEASURED = re.compile(r"<!-- results .*?<!-- /results -->", re.DOTALL)
"""A block of a page that is made of a file in results/."""
FILES = {
    "pages": ("*.md", "*/README.md", ".github/*.md", "docs/**/*.md", "notes/**/*.md"),
    "examples": ("examples/*.py",),
    "blocktune": ("blocktune/*.py",),
    **{room: (f"blocktune/{room}/**/*.py",) for room in ("kernels", "tuner", "db", "cli")},
    "integrations": ("integrations/**/*.py", "integrations/**/*.md"),
    "tools": ("tools/lab/*.py", "tools/pages/**/*.py"),
}


def words_in(text: str, first_line: int = 1) -> list[tuple[int, str]]:
    """Return the avoided words of a text, each after its line."""
    prose = NAMES.sub("", text)
    found = PATTERN.finditer(prose)
    return [(first_line + prose.count("\n", 0, word.start()), " ".join(word[0].split())) for word in found]


def hashed_lines(tree: ast.AST) -> set[int]:
    """Return the lines of jitted functions. Stored results are keyed by a hash of their text, so it stays as it is."""
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
    jitted = [f for f in functions if re.search("jit|constexpr_function", " ".join(map(ast.unparse, f.decorator_list)))]
    return {line for f in jitted for line in range(f.lineno, (f.end_lineno or f.lineno) + 1)}


def comments(source: str) -> str:
    """Return the comments of a source, each in its line, and nothing else."""
    lines = [""] * (source.count("\n") + 2)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0] - 1] = token.string.lstrip("# ")
    return "\n".join(lines)


def sentences(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the docstrings and the strings with a space, each after its line. Other strings are keys and names."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) in docstrings:
                yield node.lineno, node.value
            elif " " in node.value:
                yield node.lineno, node.value.replace("\n", " ")  # lines of a message are not lines of the file


def avoided_words(path: Path) -> list[tuple[int, str]]:
    """Return the avoided words that people read in a file, each after its line."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return words_in(MEASURED.sub(lambda block: "\n" * block[0].count("\n"), text))
    tree = ast.parse(text)
    found = words_in(comments(text)) + [word for line, string in sentences(tree) for word in words_in(string, line)]
    hashed = hashed_lines(tree)
    return sorted(word for word in found if word[0] not in hashed)


@pytest.mark.parametrize("place", FILES)
def test_what_people_read_is_in_plain_words(place: str) -> None:
    paths = sorted(path for pattern in FILES[place] for path in ROOT.glob(pattern))
    assert paths
    found = [f"{path.relative_to(ROOT)}:{line}: {word}" for path in paths for line, word in avoided_words(path)]
    assert not found, "\n".join(found)


def test_words_are_found_where_people_read_them(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text(
        '"""A title.\n\nThere are so\nmany."""\n\n# Nobody waits, as so\n# many do.\n'
        'raise ValueError(f"{key} was told twice")\n'
    )
    assert avoided_words(source) == [(3, "so many"), (6, "Nobody"), (6, "so many"), (8, "told")]
    page = tmp_path / "page.md"
    page.write_text(
        "Beside it, once a\nlaunch.\n<!-- results a.json -->\nbehind\n<!-- /results -->\n"
        "<!-- output tune -->\nsomebody's\n"
    )
    assert avoided_words(page) == [(1, "Beside"), (1, "once a launch"), (7, "somebody")]


def test_names_and_jitted_functions_are_left_alone(tmp_path: Path) -> None:
    source = tmp_path / "source.py"
    source.write_text(
        'asked = {"told": beside_us}  # `asked`, by key\n"""Names.\n\nasked: which they are, if that is None\n"""\n\n'
        '@triton.jit(do_not_specialize=SIZES)\ndef kernel():\n    """Wait beside nobody."""\n    x = 1  # anew\n'
    )
    assert avoided_words(source) == []
    source.write_text(source.read_text().replace("@triton.jit", "@triton.heuristics"))
    assert avoided_words(source) == [(9, "beside"), (9, "nobody"), (10, "anew")]


PRIVATE = re.compile(
    r"\b(?:paper rule|paper's rule|paper's block rule|best peer|by (?:which|a) rung|would do nothing|outranks|"
    r"waiting for no unit|\d+ columns|is to reach|not served|the lane)\b",
    re.IGNORECASE,
)
"""Words of our own. "FlashAttention's heuristic", "fastest rival", "source", "not supported", "is used instead",
"latency", "head_dim 128", "target", "unit" are the field's."""
SAID = {
    "pages": ("README.md", "docs/**/*.md"),
    "commands": ("blocktune/cli/**/*.py", "blocktune/tuner/cost/*.py", "blocktune/tuner/search/*.py"),
}


@pytest.mark.parametrize("place", SAID)
def test_what_users_read_has_the_words_of_the_field(place: str) -> None:
    found = []
    for path in sorted(path for pattern in SAID[place] for path in ROOT.glob(pattern)):
        text = path.read_text(encoding="utf-8")
        said = [(0, text)] if path.suffix == ".md" else sentences(ast.parse(text))
        found += [
            f"{path.relative_to(ROOT)}:{line}: {word[0]}" for line, each in said for word in PRIVATE.finditer(each)
        ]
    assert not found, "\n".join(found)
