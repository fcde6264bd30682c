"""Words in, tables out: every command parses its flags, calls one function and prints what it returned."""
