"""What the package must never do: run data that others wrote, or make tensors wherever a user's default device is."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path
    for places in ("blocktune/*.py", "kernels/**/*.py", "db/**/*.py", "tuner/**/*.py", "cli/**/*.py")
    for path in ROOT.glob(places)
)
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "yaml.load", "torch.load", "os.system", "os.popen"}


def offences(source: str) -> list[str]:
    """The forbidden imports and calls in this source."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
            found.append(str(node.module))
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in FORBIDDEN_CALLS:
            found.append(ast.unparse(node.func))
        elif isinstance(node, ast.keyword) and node.arg == "shell" and ast.unparse(node.value) == "True":
            found.append("shell=True")
    return found


WRITTEN_HERE = {"kernels/tuned/call_key.py": ["eval"]}
"""A tuple of places of arguments, which that file puts together from numbers and its own words: no name or value of a
call is in it."""


def test_nothing_stored_is_executed() -> None:
    assert len(SOURCES) > 500
    found = {str(path.relative_to(ROOT)): offences(path.read_text()) for path in SOURCES}
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


MAKERS = "arange empty empty_strided eye full linspace ones rand randint randn randperm tensor zeros"
FACTORIES = {f"torch.{name}" for name in MAKERS.split()}
"""PyTorch's functions that make a tensor on the default device unless they get one."""


def without_a_device(source: str) -> list[str]:
    """The calls in this source that leave the device to `torch.set_default_device`."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    made = (call for call in calls if ast.unparse(call.func) in FACTORIES)
    return [ast.unparse(call) for call in made if not {"device", None} & {word.arg for word in call.keywords}]


def test_no_tensor_is_made_on_the_default_device() -> None:
    found = {str(path.relative_to(ROOT)): without_a_device(path.read_text()) for path in SOURCES}
    assert {path: calls for path, calls in found.items() if calls} == {}


def test_the_check_sees_tensors_without_a_device() -> None:
    assert without_a_device("torch.zeros(3)") == ["torch.zeros(3)"]
    assert not without_a_device("torch.zeros(3, device=x.device); tl.zeros([3]); torch.full((), 1, **place)")
