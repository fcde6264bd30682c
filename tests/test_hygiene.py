"""What the package must never do: run data that others wrote, read files and variables by another door, or make
tensors wherever a user's default device is."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "blocktune"
SOURCES = sorted(PACKAGE.rglob("*.py"))
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "yaml.load", "torch.load", "os.system", "os.popen"}


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


def offences(source: str) -> list[str]:
    """The forbidden imports and calls in this source."""
    found = []
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
            found.append(str(node.module))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in FORBIDDEN_CALLS:
            found.append(ast.unparse(node.func))
        elif isinstance(node, ast.keyword) and node.arg == "shell" and ast.unparse(node.value) == "True":
            found.append("shell=True")
    return found


WRITTEN_HERE = {"runtime/autotuned/call_key.py": ["eval"]}
"""A tuple of places of arguments, which that file puts together from numbers and its own words: no name or value of a
call is in it."""


def test_nothing_stored_is_executed() -> None:
    assert len(SOURCES) > 500
    found = {str(path.relative_to(PACKAGE)): offences(path.read_text()) for path in SOURCES}
    assert {path: names for path, names in found.items() if names} == WRITTEN_HERE


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "eval(text)",
        "yaml.load(file)",
        "subprocess.run(text, shell=True)",
    ],
)
def test_the_check_sees_what_it_forbids(source: str) -> None:
    assert offences(source)


READS = {"open", "fdopen", "read_text", "read_bytes", "copyfile", "copy2", "run_path", "fromfile", "memmap"}
DOORS = {"sqlite3.connect", "gzip.open", "os.getenv"}
HOME = "kernels/files"
OWN_CLASSES = re.compile(r"^(ResultStore|StreamedStore|StoreTail|Nvml)\.open$|\(own\)|^cls\.open$")

OTHER_DOORS: dict[str, dict[str, str]] = {
    "__init__.py": {"Path(__file__).with_suffix('.pyi').read_text": "the stub next to it"},
    "runtime/store_reader/store_file.py": {
        "sqlite3.connect": "SQLite reads its own file, whose kind `_require_file` checks"
    },
    "db/tables/sqlite_file.py": {"sqlite3.connect": "SQLite reads its own file, whose kind `connect` checks"},
    "db/recovery/salvage.py": {"sqlite3.connect": "a database in memory"},
    "db/recovery/drill.py": {"sqlite3.connect": "copies of its own"},
    "db/recovery/restoring.py": {"fresh.open": "writes"},
    "db/exchange/document.py": {"path.open": "writes", "os.fdopen": "writes", "os.open": "a pipe, to write"},
    "db/spool.py": {"os.fdopen": "writes as well, and locks; opened without waiting", "os.open": "of the same file"},
    "db/tables/backups.py": {"os.open": "makes a file"},
    "tuner/compile/answers.py": {"os.fdopen": "its own standard output"},
    "tuner/compile_server/forked_worker.py": {"os.open": "/dev/null"},
    "tuner/measure/environment.py": {"run_path": "a file of PyTorch's"},
    "tuner/measure/lock_file.py": {
        "os.fdopen": "writes nothing",
        "os.open": "a lock of its own, opened without waiting",
        "Path(f'/proc/{process}/stat').read_text": "a line of the kernel's",
    },
    "tuner/launches/arguments.py": {"(folder / description['file']).read_bytes": "tensors of its parent, of any size"},
    "cli/main.py": {"os.open": "/dev/null"},
    "cli/output/render.py": {"os.open": "/dev/null"},
}
"""Calls that open files elsewhere, with the reason."""


def other_doors(source: str) -> set[str]:
    """The calls by which this source opens a file or reads a variable, as they are written."""
    calls = {ast.unparse(node.func) for node in ast.walk(parsed(source)) if isinstance(node, ast.Call)}
    reads = {call for call in calls if call.rpartition(".")[2] in READS and not OWN_CLASSES.search(call)}
    return (reads | (calls & DOORS)) - {"read_text", "read_bytes"}  # the functions of the door


def test_every_file_is_read_by_one_door() -> None:
    found = {
        name: doors
        for path in SOURCES
        if not (name := str(path.relative_to(PACKAGE))).startswith(HOME) and (doors := other_doors(path.read_text()))
    }
    assert found == {name: set(doors) for name, doors in OTHER_DOORS.items()}


def test_commands_print_by_one_door() -> None:
    """It says what is wrong where the output cannot be written."""
    found = [str(path.relative_to(PACKAGE)) for path in SOURCES if "typer.echo" in path.read_text()]
    assert found == ["cli/output/render.py"]


WHOLE_ENVIRONMENTS = {
    "cli/explain/checks.py": "what Triton's variables mean to `tune doctor`",
    "tuner/cluster/compile_task.py": "for a child",
    "tuner/cluster/connection.py": "for Ray",
    "tuner/cluster/worker.py": "for a child",
    "tuner/compile_server/client.py": "for a child",
    "tuner/compile_server/server.py": "that of its client",
    "tuner/fleet/local_executor.py": "for a child",
    "tuner/measure/worker_process.py": "for a child",
    "tuner/profile/nsight_compute.py": "for a child",
    "kernels/files/variables.py": "the one reader",
    "kernels/files/file_path.py": "XDG_CACHE_HOME",
    "kernels/files/line_file.py": "XDG_STATE_HOME",
    "runtime/store_reader/places.py": "XDG_DATA_HOME",
    "cli/output/progress.py": "TERM",
    "cli/output/progress_jobs.py": "TERM",
    "cli/output/render.py": "COLUMNS",
}
"""Files that read the environment or pass it on."""


def test_one_file_reads_the_variables_of_blocktune() -> None:
    texts = {str(path.relative_to(PACKAGE)): path.read_text() for path in SOURCES}
    assert {name for name, text in texts.items() if "environ" in words_of(text)} == set(WHOLE_ENVIRONMENTS)
    named = re.compile(r"""['"]BLOCKTUNE_\w+['"]""")
    assert {name for name, text in texts.items() if named.search(text)} == {"kernels/files/variables.py"}
    assert not any("envvar" in words_of(text) for text in texts.values())


def words_of(source: str) -> set[str]:
    """The names and attributes in this source."""
    nodes = list(ast.walk(parsed(source)))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    keywords = {node.arg for node in nodes if isinstance(node, ast.keyword) and node.arg}
    return names | keywords | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize(
    "source", ["open(p)", "p.read_text()", "io.open(p)", "sqlite3.connect(p)", "os.fdopen(3)", "gzip.open(p)"]
)
def test_the_check_sees_another_door(source: str) -> None:
    assert other_doors(source)


MAKERS = "arange empty empty_strided eye full linspace ones rand randint randn randperm tensor zeros"
FACTORIES = {f"torch.{name}" for name in MAKERS.split()}
"""PyTorch's functions that make a tensor on the default device unless they get one."""


def without_a_device(source: str) -> list[str]:
    """The calls in this source that leave the device to `torch.set_default_device`."""
    calls = (node for node in ast.walk(parsed(source)) if isinstance(node, ast.Call))
    made = (call for call in calls if ast.unparse(call.func) in FACTORIES)
    return [ast.unparse(call) for call in made if not {"device", None} & {word.arg for word in call.keywords}]


def test_no_tensor_is_made_on_the_default_device() -> None:
    found = {str(path.relative_to(PACKAGE)): without_a_device(path.read_text()) for path in SOURCES}
    assert {path: calls for path, calls in found.items() if calls} == {}


def test_the_check_sees_tensors_without_a_device() -> None:
    assert without_a_device("torch.zeros(3)") == ["torch.zeros(3)"]
    assert not without_a_device("torch.zeros(3, device=x.device); tl.zeros([3]); torch.full((), 1, **place)")


DEVICE_CODE = ("kernels/hopper/", "kernels/portable/")


def test_no_two_classes_have_one_name() -> None:
    """A search for a name finds one class. Device code has structs of its own in each folder, such as `Options`."""
    defined: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in parsed(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                defined.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    several = {name: paths for name, paths in defined.items() if len(paths) > 1}
    assert {name: paths for name, paths in several.items() if not all(p.startswith(DEVICE_CODE) for p in paths)} == {}
