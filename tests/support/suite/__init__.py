"""How a run of all tests goes: which cases, in what order, on which worker, with which draws."""
