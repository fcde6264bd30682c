"""A differential check of the attention functions: drawn calls, each against the definition in float64.

    PYTHONPATH=. python -P -m tools.differential --seconds 600 --jobs 16 --out results/h200.differential.json
    PYTHONPATH=. python -P -m tools.differential --seed 1 --case 3007 --shrink

case.py says what a case is, classes.py, strategies.py and features.py draw cases, tensors.py makes their tensors,
oracle.py holds the truth, calls.py makes the calls, circumstances.py and tools.py what they are made in, refusals.py
makes wrong ones, bounds.py compares, runner.py runs a case, jobs.py numbers cases, worker.py runs many in a process,
parent.py starts such processes, report.py counts, kinds.py groups failures, and shrinking.py makes them smaller.
"""
