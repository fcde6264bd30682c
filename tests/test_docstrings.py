"""The docstring of a function begins with a verb in the imperative: `Return the plan, or None.`"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERBS = frozenset(
    re.findall(
        r"\w+",
        """
    add adopt allocate allow answer append apply arrive ask assert assign attach attend autotune average begin bind
    bound break bring broadcast build cache call cancel capture carry catch change check choose clean clear climb
    close collect combine compare compile complete compute confirm connect convert copy correct count cover create
    cross cut decide decode define delete derive describe detect discard divide do draw drop encode end enqueue
    ensure estimate evaluate exchange execute exit expand explain export expose extend extract feed fetch fill
    filter find finish fit fix fold follow forget format forward free freeze gather generate get give group guard
    guess hand handle hash have help hide hold identify ignore import increase index initialise insert install
    interrupt invite issue iterate join judge keep kill label launch lay leave let limit list load locate lock log
    look lower make map mark mask match measure merge mix move multiply name normalise note notice number open order
    own pack pad parse pass patch pick pin place plan play point poison poll predict prefer prepare press print
    probe promote propose prove publish pull push put quote raise rank read rebuild receive record recover reduce
    refer refresh refuse register reject release remember remove rename render repeat replace replay report request
    require reserve reset resolve restore resume retry return reverse revert rewrite rotate round run sample save
    say scale scan score search see seek select send separate serve set share shift shorten show shrink sign
    simulate skip sleep solve sort spawn split spread start state stay step stop store strip subtract sum swap
    switch take tell test time trace track transform translate transpose trim trust try tune turn undo unite unpack
    update upgrade use validate verify view visit wait walk warn watch weigh widen wrap write yield
    """,
    )
)
"""Words that a docstring may begin with. A verb that is missing is added here."""
ROOMS = (
    "blocktune",
    "integrations/sglang/blocktune_sglang",
    "integrations/vllm/blocktune_vllm",
    "tools/lab",
    "tools/pages",
)
PATHS = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
LEFT_ALONE = re.compile("jit|constexpr_function|property|setter|overload")
"""Decorators. Stored results are keyed by the text of jitted functions; a property is described like a value."""


def documented_functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    """Yield the functions whose docstring says what a call does, but not those inside of a jitted one."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and LEFT_ALONE.search(" ".join(map(ast.unparse, node.decorator_list))):
            continue
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
            yield node
        yield from documented_functions(node)


def nouns_first(source: str) -> list[tuple[int, str]]:
    """Return the first words of docstrings that are no verb, each after its line."""
    first = (
        (node.lineno, (ast.get_docstring(node) or "").split()[0]) for node in documented_functions(ast.parse(source))
    )
    return [(line, word) for line, word in first if word.strip(".,:;").lower() not in VERBS]


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    assert len(PATHS) > 500
    found = {path.relative_to(ROOT).as_posix(): nouns_first(path.read_text()) for path in PATHS}
    assert {path: words for path, words in found.items() if words} == {}


def test_a_noun_a_third_person_and_a_bare_section_are_found() -> None:
    source = '''
class Kept:
    def one(self):
        """The plan."""
    def two(self):
        """Returns the plan."""
    def three(self):
        """Raises:
        ValueError: always.
        """
    def four(self):
        """Return the plan."""
    @property
    def five(self):
        """The plan."""
@triton.jit
def six():
    """The plan."""
    def inner():
        """The plan."""
def seven(): pass
'''
    assert nouns_first(source) == [(3, "The"), (5, "Returns"), (7, "Raises:")]


HASHED = re.compile(r"blocktune/kernels/(base|hardware|historical|hopper|portable|values)/")
"""Folders whose files are part of a kernel's source hash, by which stored results are keyed."""


def subjectless(source: str) -> list[tuple[int, str]]:
    """Return the first words of modules and classes that a clause describes (`What a search tries`), by line."""
    described = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Module | ast.ClassDef))
    first = ((node.body[0].lineno if node.body else 1, ast.get_docstring(node) or "") for node in described)
    return [(line, text.split()[0]) for line, text in first if re.match(r"(What|Who|Whose|Of)\b", text)]


def test_modules_and_classes_have_a_subject() -> None:
    names = {path: path.relative_to(ROOT).as_posix() for path in PATHS}
    found = {name: subjectless(path.read_text()) for path, name in names.items() if not HASHED.match(name)}
    assert {name: words for name, words in found.items() if words} == {}


def test_a_clause_for_a_subject_is_found() -> None:
    source = '"""What is measured."""\nclass One:\n    """Whose turn it is."""\nclass Two:\n    """A turn of one."""\n'
    assert subjectless(source) == [(1, "What"), (3, "Whose")]
