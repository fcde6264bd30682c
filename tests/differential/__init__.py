"""A differential check of the attention functions: drawn calls, each against the definition in float64.

    PYTHONPATH=. python -P -m tests.differential --seconds 600 --jobs 16 --out results/h200.differential.json

case.py says what a case is, strategies.py draws cases, tensors.py makes their tensors, oracle.py holds the truth,
calls.py makes the calls and circumstances.py what they are made in, refusals.py makes wrong ones, bounds.py compares,
runner.py runs a case, worker.py many in a process, parent.py starts such processes, and report.py counts.
"""
