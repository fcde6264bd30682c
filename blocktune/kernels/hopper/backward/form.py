"""What follows from the options of a launch of the Hopper backward (`Options` in arguments.py), at compile time."""

from triton.experimental import gluon


@gluon.constexpr_function
def is_diagonal(options):
    """Return whether the form is plain and has a diagonal, which is all that hides keys then."""
    return options.CAUSAL and not options.GENERAL


@gluon.constexpr_function
def has_diagonal_and_ends(options):
    """Return whether a diagonal alone hides keys from a query, and the last blocks of keys and of queries may be
    parts."""
    return options.RIGHT and options.RAGGED_K and options.RAGGED_Q and not options.LEFT


@gluon.constexpr_function
def begins_with_masks(options):
    """Return whether the blocks of queries that a walk begins with may hold pairs with a key that do not see each
    other; lists begin with them."""
    plain = options.CAUSAL and not options.GENERAL
    first = plain or options.RIGHT or options.LEFT or options.RAGGED_K
    return options.LISTED or (options.LEFT or options.RAGGED_Q if options.BACK else first)


@gluon.constexpr_function
def ends_with_masks(options):
    """Return whether the blocks of queries that a walk ends with may hold such pairs."""
    first = options.RIGHT or options.LEFT or options.RAGGED_K
    last = options.LEFT or options.RAGGED_Q
    return not options.LISTED and not options.BOTH_WAYS and (first if options.BACK else last)


@gluon.constexpr_function
def parts_of_walk(options):
    """Return how many times a walk passes the loops of masked and of other blocks: twice where masks stand at its
    beginning or at its end, as the tile has it."""
    return 2 if options.BOTH_WAYS else 1


@gluon.constexpr_function
def counts_all_tiles(options):
    """Return whether the first tiles come from the counter, too: some are passed over, or all must be taken in
    order."""
    return options.ORDERED or options.PACKED
