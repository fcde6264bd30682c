"""Other implementations of the same attention, timed in one interleaved run; the history of attention."""
