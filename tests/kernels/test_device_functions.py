"""How much a device function takes at once: limits that only go down. A kernel's parameters are the launch itself.

What a reader has to keep in mind grows with the parameters of a function and with the values that one line unpacks.
Structs replace both (kernels/hopper/forward/arguments.py). An improvement lowers the limit here.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

KERNELS = Path(__file__).parents[2] / "blocktune" / "kernels"
MOST_PARAMETERS, MOST_UNPACKED = 20, 4
"""What a device function may take, and a line unpack."""
DEVICE_PARAMETERS = {
    "historical": 19,
    "hopper/backward": 12,
    "hopper/biases": 9,
    "hopper/common": 5,
    "hopper/decode": 9,
    "hopper/decode8": 9,
    "hopper/forward": 10,
    "hopper/fp8": 8,
    "portable/backward": 15,
    "portable/decode": 8,
    "portable/decode8": 11,
    "portable/forward": 13,
}
"""The most parameters of a function that device code calls, by folder; others have none."""
KERNEL_PARAMETERS = {
    "historical": 39,
    "hopper/backward": 44,
    "hopper/biases": 16,
    "hopper/decode": 32,
    "hopper/decode8": 40,
    "hopper/forward": 35,
    "hopper/fp8": 24,
    "portable/backward": 57,
    "portable/decode": 40,
    "portable/decode8": 47,
    "portable/forward": 47,
    "portable/partials": 23,
    "portable/sinks": 19,
}
"""The most parameters of a kernel, by folder. Run-time integers stand one by one: inside a tuple Triton compiles a 1 or
a multiple of 16 in, which costs a compilation for each and another machine code."""


def device_functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield all jitted functions, each with its folder."""
    for path in sorted(KERNELS.rglob("*.py")):
        folder = "/".join(path.relative_to(KERNELS).parts[:-1][:2])
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(each) for each in node.decorator_list):
                yield folder, node


def parameters(function: ast.FunctionDef) -> int:
    arguments = function.args
    return len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs)


def most_parameters(*, kernels: bool) -> dict[str, int]:
    """Return the most parameters by folder, of kernels or of what they call."""
    most: dict[str, int] = {}
    for folder, function in device_functions():
        if function.name.endswith("_kernel") == kernels:
            most[folder] = max(most.get(folder, 0), parameters(function))
    return most


def wide_unpackings() -> Counter[str]:
    """Count the lines that unpack more than `MOST_UNPACKED` values, by folder."""
    return Counter(
        folder
        for folder, function in device_functions()
        for node in ast.walk(function)
        if isinstance(node, ast.Assign)
        and any(isinstance(goal, ast.Tuple) and len(goal.elts) > MOST_UNPACKED for goal in node.targets)
    )


def test_device_functions_take_no_more_parameters_than_they_did() -> None:
    assert most_parameters(kernels=False) == DEVICE_PARAMETERS


def test_kernels_take_no_more_parameters_than_they_did() -> None:
    assert most_parameters(kernels=True) == KERNEL_PARAMETERS


def test_no_line_of_device_code_unpacks_many_values() -> None:
    assert wide_unpackings() == {}


def test_no_device_function_takes_more_parameters_than_the_target() -> None:
    assert {folder: most for folder, most in DEVICE_PARAMETERS.items() if most > MOST_PARAMETERS} == {}
