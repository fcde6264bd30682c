"""From words of 8-bit numbers in shared memory to operands of a warpgroup's products, in Gluon: device functions.

Both products have the packed rows as their columns: S^T = K Q^T and O^T = V^T P^T. So keys and values are operand A,
which a warpgroup reads from registers: a converted number never goes through shared memory. A product does not care for
the order of the dimension that it sums over: a thread takes 16 neighbouring columns of a key, and the columns of Q are
put into the same order (`in_order_of_keys`). The columns of V come out permuted, and `in_order` puts them back.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from blocktune.kernels.hopper.decode8.numbers import halves, pairs_of_columns, pairs_of_keys


@gluon.constexpr_function
def bits(number):
    """The exponent of a power of two."""
    return number.bit_length() - 1


@gluon.constexpr_function
def product_layout(warps, rows):
    """Of both products' results, [keys, rows] and [WIDTH_V, rows]."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, rows, 16])


@gluon.constexpr_function
def key_layout(warps, keys, words):
    """Of the words of K [keys, words]: operand A, four words of a key side by side."""
    registers = [[0, 1], [0, 2]] + [[0, 16 << bit] for bit in range(bits(words) - 4)] + [[8, 0]]
    registers += [[1 << bit, 0] for bit in range(4 + bits(warps), bits(keys))]
    lanes = [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        registers, lanes, [[16 << bit, 0] for bit in range(bits(warps))], [], [keys, words]
    )


@gluon.constexpr_function
def value_layout(warps, keys, words):
    """Of the words of V [keys, words]: operand A of a product with V^T, but for the order of rows."""
    own = words // (8 * warps)
    registers = [[0, 1 << bit] for bit in range(bits(own))] + [[1, 0], [8, 0]]
    registers += [[16 << bit, 0] for bit in range(bits(keys) - 4)]
    lanes = [[2, 0], [4, 0]] + [[0, own << bit] for bit in range(3)]
    warp_bases = [[0, (8 * own) << bit] for bit in range(bits(warps))]
    return gl.DistributedLinearLayout(registers, lanes, warp_bases, [], [keys, words])


@gluon.constexpr_function
def result_layout(warps, rows, width):
    """Of the output [rows, width] as the second product leaves it: a thread has neighbouring columns, four of 128."""
    own = width // (8 * warps)
    registers = [[0, 1 << bit] for bit in range(bits(own))] + [[1, 0]]
    registers += [[8 << bit, 0] for bit in range(bits(rows) - 3)]
    lanes = [[2, 0], [4, 0]] + [[0, own << bit] for bit in range(3)]
    warp_bases = [[0, (8 * own) << bit] for bit in range(bits(warps))]
    return gl.DistributedLinearLayout(registers, lanes, warp_bases, [], [rows, width])


@gluon.jit
def keys_of(words, INT8: gl.constexpr, OPERAND: gl.constexpr):
    """K [keys, WIDTH] in float16 of words [keys, WIDTH / 4], its columns in an order of their own."""
    KEYS: gl.constexpr = words.shape[0]
    PARTS: gl.constexpr = words.shape[1] // 16
    low, high = pairs_of_columns(gl.reshape(words, [KEYS, PARTS, 4, 4]), INT8)
    # [KEYS, part, lane, word, half, 2] -> [KEYS, part, word, half, lane, 2]
    k = gl.permute(halves(gl.join(low, high)), (0, 1, 3, 4, 2, 5))
    return gl.convert_layout(gl.reshape(k, [KEYS, 64 * PARTS]), OPERAND, assert_trivial=True)


@gluon.jit
def in_order_of_keys(q):
    """Q [rows, WIDTH] with its columns in the order that those of `keys_of` have."""
    ROWS: gl.constexpr = q.shape[0]
    PARTS: gl.constexpr = q.shape[1] // 64
    # [ROWS, part, lane, word, half, 2] -> [ROWS, part, word, half, lane, 2]
    q = gl.permute(gl.reshape(q, [ROWS, PARTS, 4, 4, 2, 2]), (0, 1, 3, 4, 2, 5))
    return gl.reshape(q, [ROWS, 64 * PARTS])


@gluon.jit
def values_of(words, INT8: gl.constexpr, OPERAND: gl.constexpr):
    """V^T [WIDTH_V, keys] in float16 of words [keys, WIDTH_V / 4], its rows in the order that `in_order` undoes."""
    W: gl.constexpr = gl.num_warps()
    KEYS: gl.constexpr = words.shape[0]
    OWN: gl.constexpr = words.shape[1] // (8 * W)
    # [KEYS / 2, W, lane, word, key of the pair]
    pairs = gl.permute(gl.reshape(words, [KEYS // 2, 2, W, 8, OWN]), (0, 2, 3, 4, 1))
    even, odd = gl.split(pairs)
    first, second, third, fourth = pairs_of_keys(even, odd, INT8)
    v = halves(gl.join(gl.join(first, third), gl.join(second, fourth)))
    # [KEYS / 2, W, lane, pair of columns, column, key] -> [pair, W, column, lane, KEYS / 2, key]
    v = gl.permute(gl.reshape(v, [KEYS // 2, W, 8, 2 * OWN, 2, 2]), (3, 1, 4, 2, 0, 5))
    return gl.convert_layout(gl.reshape(v, [32 * OWN * W, KEYS]), OPERAND, assert_trivial=True)


@gluon.jit
def in_order(acc):
    """The second product [WIDTH_V, rows] as [rows, WIDTH_V], its columns in their own order."""
    W: gl.constexpr = gl.num_warps()
    WIDTH: gl.constexpr = acc.shape[0]
    ROWS: gl.constexpr = acc.shape[1]
    # [pair, W, column, lane, ROWS] -> [ROWS, W, lane, pair, column]
    o = gl.reshape(acc, [WIDTH // (16 * W), W, 2, 8, ROWS])
    o = gl.reshape(gl.permute(o, (4, 1, 3, 0, 2)), [ROWS, WIDTH])
    return gl.convert_layout(o, result_layout(W, ROWS, WIDTH), assert_trivial=True)
