"""What a launch of the Hopper backward has, as two numbers that are known at compile time: FORM and NAMED.

In the plain form FORM is 0, or has `SHORT` and `TOGETHER` alone: 128 divides both lengths, and nothing is masked but
the diagonal of equal lengths. In every other one it is a sum of bits, `GENERAL` among them. NAMED says which of the
warpgroups' barriers are the hardware's named ones.
"""

from triton.experimental import gluon


@gluon.constexpr_function
def bits(*words):
    """Return the sum of these bits of FORM; the functions below say what each one means.

    Triton hashes this text, but no numbers that a constexpr function takes from its module.
    """
    order = (
        "upper", "lower", "edge", "moving", "softcap", "ordered", "packed", "general", "tail", "listed", "back",
        "short", "together", "both",
    )  # fmt: skip
    return sum(1 << order.index(word) for word in words)


UPPER, LOWER, EDGE, MOVING, SOFTCAP, ORDERED, PACKED, GENERAL, TAIL, LISTED, BACK, SHORT, TOGETHER, BOTH = (
    bits(word)
    for word in (
        "upper", "lower", "edge", "moving", "softcap", "ordered", "packed", "general", "tail", "listed", "back",
        "short", "together", "both",
    )
)  # fmt: skip
"""The bits of FORM on the host."""


@gluon.constexpr_function
def is_general(form):
    """Whether the form is another than the plain one."""
    return form & bits("general") != 0


@gluon.constexpr_function
def has_upper(form):
    """Whether a query i sees keys up to i + upper only."""
    return form & bits("upper") != 0


@gluon.constexpr_function
def has_lower(form):
    """Whether a query i sees keys from i + lower on only."""
    return form & bits("lower") != 0


@gluon.constexpr_function
def has_edge(form):
    """Whether the last block of keys may be a part of one."""
    return form & bits("edge") != 0


@gluon.constexpr_function
def has_tail(form):
    """Whether the last block of queries may be a part of one."""
    return form & bits("tail") != 0


@gluon.constexpr_function
def has_diagonal_and_ends(form):
    """Whether a diagonal alone hides keys from a query, and the last blocks of keys and of queries may be parts."""
    return form & bits("upper", "lower", "edge", "tail") == bits("upper", "edge", "tail")


@gluon.constexpr_function
def has_masks(form):
    """Whether the first blocks of queries may hold pairs with a key that do not see each other."""
    return form & bits("upper", "lower", "edge") != 0


@gluon.constexpr_function
def has_last_masks(form):
    """Whether the last blocks of queries may hold such pairs."""
    return form & bits("lower", "tail") != 0


@gluon.constexpr_function
def begins_masked(form):
    """Whether the blocks of queries that a walk begins with may hold such pairs; lists begin with them."""
    if is_listed(form):
        return True
    return has_last_masks(form) if goes_back(form) else has_masks(form)


@gluon.constexpr_function
def ends_masked(form):
    """Whether the blocks of queries that a walk ends with may hold such pairs."""
    if is_listed(form) or goes_both_ways(form):
        return False
    return has_masks(form) if goes_back(form) else has_last_masks(form)


@gluon.constexpr_function
def is_rotated(causal, form):
    """Whether walks would take the same blocks of queries at the same time: then each tile begins with another one."""
    return not causal and form & bits("upper", "lower", "ordered", "listed") == 0


@gluon.constexpr_function
def tiles_together(form):
    """How many tiles of a head begin with the same queries where walks are rotated."""
    return 8 if form & bits("together") else 1


@gluon.constexpr_function
def asks_ahead(options):
    """Whether the values of an additive mask are loaded a step ahead; not where steps compare places or draw what is
    dropped as well, which takes the registers."""
    return options.MASK_CODE == 2 and not options.DROPOUT and is_rotated(options.CAUSAL, options.FORM)


@gluon.constexpr_function
def has_moving_bounds(form):
    """Whether upper and lower move with the sequence: by its keys minus its queries."""
    return form & bits("moving") != 0


@gluon.constexpr_function
def has_softcap(form):
    """Whether a soft cap bends the scores."""
    return form & bits("softcap") != 0


@gluon.constexpr_function
def is_ordered(form):
    """Whether dq is added up in a fixed order."""
    return form & bits("ordered") != 0


@gluon.constexpr_function
def goes_back(form):
    """Whether walks of a fixed order begin with the last queries, and the tiles of the first keys add first
    (turns.py)."""
    return form & bits("back") != 0


@gluon.constexpr_function
def goes_both_ways(form):
    """Whether walks of a fixed order go back for the last heads of a launch alone, whose longest tiles come first
    (turns.py)."""
    return form & bits("both") != 0


@gluon.constexpr_function
def parts_of_walk(form):
    """How many times a walk passes the loops of masked and of other blocks: twice where masks stand at its beginning or
    at its end, as the tile has it."""
    return 2 if goes_both_ways(form) else 1


@gluon.constexpr_function
def is_packed(form):
    """Whether sequences are packed."""
    return form & bits("packed") != 0


@gluon.constexpr_function
def is_listed(form):
    """Whether lists name the blocks of queries that see a tile of keys (kernels/hopper/sparse/lists.py)."""
    return form & bits("listed") != 0


@gluon.constexpr_function
def has_short_walks(form):
    """Whether tiles are so short, under a window, a block mask or a short diagonal, that it pays to end one while the
    next one begins; not in a fixed order, where that spills."""
    return form & bits("lower", "listed", "short") != 0 and not is_ordered(form)


@gluon.constexpr_function
def adds_apart(deferred, persistent, causal, form):
    """Whether warps of their own add dQ however far scores run ahead. deferred: dQ is computed one step later."""
    plain = not causal and not is_general(form)
    return form & bits("ordered", "listed") != 0 or (deferred and persistent and plain)


@gluon.constexpr_function
def counts_all_tiles(form):
    """Whether the first tiles come from the counter, too: some are passed over, or all must be taken in order."""
    return form & bits("ordered", "packed") != 0


@gluon.constexpr_function
def names_exchange(named):
    """Whether warpgroups pass tiles to each other at named barriers."""
    return named & 1 != 0


@gluon.constexpr_function
def names_release(named):
    """Whether stages are given back at named barriers."""
    return named & 2 != 0
