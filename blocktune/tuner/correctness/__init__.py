"""Whether a candidate computes the right result: inputs, references and tolerances."""
