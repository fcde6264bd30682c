"""Tables of searches: ladders, replays, untuned shapes."""
