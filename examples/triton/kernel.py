"""MXFP8 flash attention for packed documents in Triton, forward and backward, by the steps of `flamia-mxfp8-folded`.

Every operand is E4M3 codes with E8M0 scales. Q, K, V and dO have one scale a token and head; where the contraction
runs over tokens it is folded into P or dS before those are quantized, so K, Q, V and dO are one copy each. The steps
and their numbers are those of flamia_ref/attention/recipes/flamia_mxfp8_folded.py.

Launch with enable_fp_fusion=False: a product and a sum are rounded separately unless the recipe says fma.

Arrays: codes [tokens, heads, channels] and scales [tokens, heads], uint8; rows [heads, tokens], float32. `starts` are
the documents' first tokens. `whole` [documents]: 1 where an operand holds a NaN code, which in the instruction's chain
reaches pairs behind the mask too (0 times NaN is NaN), so that no tile may be skipped there.

`pairs` and `blocks` [documents]: where a document's stages [heads, queries, keys], and their scales, start; they are
stored where TRACE is set.
"""

import triton
import triton.language as tl

from examples.triton.instructions import bfloat16, e4m3, ex2, fused, lg2, rcp, scaled_dot, summed
from examples.triton.mistakes import Mistake

BLOCK = tl.constexpr(32)
PER_LARGEST = tl.constexpr(1 / 448)
LOG2_E = tl.constexpr(1.4426950216293335)  # 0x3fb8aa3b
LN_2 = tl.constexpr(0.6931471824645996)  # 0x3f317218
LOWEST = tl.constexpr(float("-inf"))

NEIGHBOUR_SCALE = tl.constexpr(int(Mistake.NEIGHBOUR_SCALE))
FLOOR_SCALE = tl.constexpr(int(Mistake.FLOOR_SCALE))
MASK_OFF_BY_ONE = tl.constexpr(int(Mistake.MASK_OFF_BY_ONE))
V_NOT_FOLDED = tl.constexpr(int(Mistake.V_NOT_FOLDED))
DOCUMENTS_JOINED = tl.constexpr(int(Mistake.DOCUMENTS_JOINED))
HEADS_MODULO = tl.constexpr(int(Mistake.HEADS_MODULO))
NO_DELTA = tl.constexpr(int(Mistake.NO_DELTA))
STALE_PADDING = tl.constexpr(int(Mistake.STALE_PADDING))


@triton.jit
def power(exponent):
    """float32 2^exponent, from -126 to 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def of_byte(byte):
    """The float32 value of an E8M0 byte; 2^-127, of byte 0, is a subnormal."""
    wide = byte.to(tl.int32)
    return tl.where(wide == 0, 0x400000, wide << 23).to(tl.float32, bitcast=True)


@triton.jit
def shift(x, exponent):
    """x 2^exponent with one rounding, `exponent` an integer in float32, or NaN, which counts as 0.

    In two steps, the first exact wherever the result is not 0 anyway.
    """
    kept = tl.where(exponent == exponent, exponent, 0.0)
    kept = tl.where(kept < -252.0, -252.0, tl.where(kept > 254.0, 254.0, kept)).to(tl.int32)
    last = tl.where(kept < -126, -126, tl.where(kept > 127, 127, kept))
    return x * power(kept - last) * power(last)


@triton.jit
def encode(x, FLOOR: tl.constexpr):
    """Codes and scale bytes of x [rows, blocks, elements of a block], by the rule te-mx-e4m3."""
    largest = tl.max(tl.where(x == x, tl.abs(x), 0.0), 2)
    bits = (largest * PER_LARGEST).to(tl.int32, bitcast=True)
    byte = bits >> 23
    rest = bits & 0x7FFFFF
    if not FLOOR:
        up = (rest > 0x400000) | ((rest > 0) & (byte > 0))
        byte = tl.where(up, byte + 1, byte)
    byte = tl.where(byte > 254, 254, byte)
    codes = e4m3(x * of_byte(254 - byte)[:, :, None])
    return codes, byte.to(tl.uint8)


@triton.jit
def encode_blocks(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr, FLOOR: tl.constexpr):
    """Codes [rows, columns] and bytes [rows, columns / 32] of x [rows, columns]."""
    codes, byte = encode(tl.reshape(x, [ROWS, COLUMNS // BLOCK, BLOCK]), FLOOR)
    return tl.reshape(codes, [ROWS, COLUMNS]), byte


@triton.jit
def split(s, c):
    """Step 3: n = ceil(S c) and E = 2^(S c - n)."""
    n = tl.ceil(s * c)
    n = tl.where(n == float("inf"), float("nan"), n)
    n = tl.where(n == 0.0, 0.0, n)
    return n, ex2(fused(s, c, -n))


@triton.jit
def raised(e, n, base):
    """E 2^(n - base): 0 where n is -infinity, NaN where n or the base is."""
    p = tl.where(n == LOWEST, 0.0, shift(e, n - base))
    return tl.where((n == n) & (base == base), p, float("nan"))


@triton.jit
def kv_head_of(head, heads, group, MISTAKE: tl.constexpr):
    """The key/value head of a query head."""
    if MISTAKE == HEADS_MODULO:
        return head % (heads // group)
    return head // group


@triton.jit
def seen_pairs(row, key, length, start, CAUSAL: tl.constexpr, MISTAKE: tl.constexpr):
    """Which pairs of rows and keys, two arrays that broadcast, are legal."""
    seen = (row < length) & (key < length) & (start + key >= 0)
    if CAUSAL:
        last = row
        if MISTAKE == MASK_OFF_BY_ONE:
            last = row + 1
        seen = seen & (key <= last)
    return seen


@triton.jit
def load_codes(codes, token, there, head, heads, CHANNELS: tl.constexpr, D: tl.constexpr):
    """Codes [tokens, D] of a head: zeros where a token is not there, and past the channels."""
    channel = tl.arange(0, D)
    place = (token[:, None].to(tl.int64) * heads + head) * CHANNELS + channel[None, :]
    return tl.load(codes + place, mask=there[:, None] & (channel < CHANNELS)[None, :], other=0)


@triton.jit
def load_scales(scales, token, there, head, heads):
    """Bytes [tokens] of a head, 127 where a token is not there."""
    return tl.load(scales + token.to(tl.int64) * heads + head, mask=there, other=127)


@triton.jit
def of_blocks(byte, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A token's byte for each block of channels, as the instruction takes them."""
    return tl.broadcast_to(byte[:, None], [ROWS, COLUMNS // BLOCK])


@triton.jit(do_not_specialize=["rows"])
def quantize(x, codes, scales, rows, CHANNELS: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr):
    """Step 1: codes [rows, channels] and bytes [rows] of bfloat16 rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, D)
    inside = (row < rows)[:, None] & (channel < CHANNELS)[None, :]
    place = row[:, None] * CHANNELS + channel[None, :]
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    found, byte = encode(tl.reshape(values, [ROWS, 1, D]), False)
    tl.store(codes + place, tl.reshape(found, [ROWS, D]), mask=inside)
    tl.store(scales + row, tl.reshape(byte, [ROWS]), mask=row < rows)


@triton.jit(do_not_specialize=["tokens", "heads", "group"])
def forward(
    q,
    q_scales,
    k,
    k_scales,
    v,
    v_scales,
    out,
    lse,
    starts,
    whole,
    tokens,
    heads,
    group,
    c,
    pairs,
    blocks,
    s_stage,
    p_stage,
    code_stage,
    scale_stage,
    max_stage,
    sum_stage,
    o_stage,
    CHANNELS: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    TRACE: tl.constexpr,
    MISTAKE: tl.constexpr,
):
    """Steps 2 to 7: out [tokens, heads, channels] in bfloat16 and lse [heads, tokens]. One program a query tile.

    KEYS is the recipe's key tile, 128: P's scales are relative to the maximum of its tile.
    """
    head, document = tl.program_id(1), tl.program_id(2)
    kv_head = kv_head_of(head, heads, group, MISTAKE)
    start = tl.load(starts + document)
    length = tl.load(starts + document + 1) - start
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    inside = row < length
    q_tile = load_codes(q, start + row, inside, head, heads, CHANNELS, D)
    q_byte = of_blocks(load_scales(q_scales, start + row, inside, head, heads), ROWS, D)
    unit = tl.full([D, KEYS // BLOCK], 127, tl.uint8)

    largest = tl.full([ROWS], LOWEST, tl.float32)
    lost = tl.zeros([ROWS], tl.int32)
    total = tl.zeros([ROWS], tl.float32)
    o = tl.zeros([ROWS, D], tl.float32)
    stop = length
    if CAUSAL and MISTAKE != MASK_OFF_BY_ONE:
        stop = tl.where(tl.load(whole + document) != 0, length, tl.minimum(length, first + ROWS))
    stop = tl.where(first < length, stop, 0)
    begin = 0
    if MISTAKE == DOCUMENTS_JOINED:
        begin = -KEYS
    for at in range(begin, stop, KEYS):
        key = at + tl.arange(0, KEYS)
        there = (key < length) & (start + key >= 0)
        k_tile = load_codes(k, start + key, there, kv_head, heads // group, CHANNELS, D)
        of_key = key
        if MISTAKE == NEIGHBOUR_SCALE:
            of_key = tl.minimum(key + 1, length - 1)
        k_byte = load_scales(k_scales, start + of_key, there, kv_head, heads // group)
        s = scaled_dot(
            q_tile,
            q_byte,
            tl.trans(k_tile),
            of_blocks(k_byte, KEYS, D),
            tl.zeros([ROWS, KEYS], tl.float32),
        )
        seen = seen_pairs(row[:, None], key[None, :], length, start, CAUSAL, MISTAKE)
        n, e = split(s, c)
        highest = tl.max(tl.where(seen & (n == n), n, LOWEST), 1)
        old = tl.where(lost != 0, float("nan"), largest)
        lost = lost | tl.max((seen & (n != n)).to(tl.int32), 1)
        largest = tl.maximum(largest, highest)
        new = tl.where(lost != 0, float("nan"), largest)
        p = tl.where(seen, raised(e, n, new[:, None]), 0.0)
        total = summed(p, shift(total, old - new))
        v_tile = load_codes(v, start + key, there, kv_head, heads // group, CHANNELS, D)
        folded = p
        if MISTAKE != V_NOT_FOLDED:
            v_byte = load_scales(v_scales, start + key, there, kv_head, heads // group)
            folded = tl.where(seen, p * of_byte(v_byte)[None, :], 0.0)
        codes, byte = encode_blocks(folded, ROWS, KEYS, MISTAKE == FLOOR_SCALE)
        o = scaled_dot(codes, byte, v_tile, unit, shift(o, (old - new)[:, None]))
        if TRACE:
            place = (
                tl.load(pairs + document) + (head * length + row[:, None]) * length + key[None, :]
            )
            legal = inside[:, None] & (key < length)[None, :] & (key >= 0)[None, :]
            tl.store(s_stage + place, s, mask=legal)
            tl.store(p_stage + place, p, mask=legal)
            tl.store(code_stage + place, codes, mask=legal)
            count = (length + BLOCK - 1) // BLOCK
            block = (at // BLOCK) + tl.arange(0, KEYS // BLOCK)
            place = (
                tl.load(blocks + document) + (head * length + row[:, None]) * count + block[None, :]
            )
            legal = inside[:, None] & (block < count)[None, :] & (block >= 0)[None, :]
            tl.store(scale_stage + place, byte, mask=legal)

    dead = (largest == LOWEST) & (lost == 0)
    channel = tl.arange(0, D)
    o = tl.where(dead[:, None], 0.0, o * rcp(total)[:, None])
    new = tl.where(lost != 0, float("nan"), largest)
    logarithm = tl.where(dead, LOWEST, (new + lg2(total)) * LN_2)
    place = ((start + row[:, None]).to(tl.int64) * heads + head) * CHANNELS + channel[None, :]
    legal = inside[:, None] & (channel < CHANNELS)[None, :]
    tl.store(out + place, bfloat16(o), mask=legal)
    of_rows = head * tokens + start + row
    tl.store(lse + of_rows, logarithm, mask=inside)
    if TRACE:
        tl.store(o_stage + place, o, mask=legal)
        tl.store(max_stage + of_rows, new, mask=inside)
        tl.store(sum_stage + of_rows, total, mask=inside)


@triton.jit(do_not_specialize=["rows", "tokens", "heads"])
def before_backward(
    dout,
    out,
    lse,
    codes,
    scales,
    base,
    delta,
    rows,
    tokens,
    heads,
    CHANNELS: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Steps 8 and 9: dO' as codes and bytes, b and delta' [heads, tokens]; b is +infinity in a dead row."""
    place = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside = place < rows
    of_rows = (place % heads) * tokens + place // heads
    channel = tl.arange(0, D)
    legal = inside[:, None] & (channel < CHANNELS)[None, :]
    elements = place[:, None] * CHANNELS + channel[None, :]
    r = tl.load(lse + of_rows, mask=inside, other=0.0)
    infinite = r == LOWEST
    r = r * LOG2_E
    magnitude = tl.load(out + elements, mask=legal, other=0.0).to(tl.int16, bitcast=True) & 0x7FFF
    dead = infinite & (tl.max(magnitude.to(tl.int32), 1) == 0)
    lost = (dead == 0) & ((r != r) | (tl.abs(r) == float("inf")))
    b = tl.where(lost, float("nan"), tl.floor(r))
    g = ex2(b - r)
    none = dead | lost
    wide = tl.load(dout + elements, mask=legal, other=0.0).to(tl.float32)
    wide = tl.where(none[:, None], 0.0, wide * g[:, None])
    found, byte = encode(tl.reshape(wide, [ROWS, 1, D]), False)
    tl.store(codes + elements, tl.reshape(found, [ROWS, D]), mask=legal)
    tl.store(scales + place, tl.reshape(byte, [ROWS]), mask=inside)
    total = tl.zeros([ROWS], tl.float32)
    for at in range(CHANNELS):
        one = tl.load(dout + place * CHANNELS + at, mask=inside, other=0.0).to(tl.float32)
        other = tl.load(out + place * CHANNELS + at, mask=inside, other=0.0).to(tl.float32)
        total = fused(tl.where(none, 0.0, one * g), other, total)
    tl.store(delta + of_rows, tl.where(dead, 0.0, total), mask=inside)
    tl.store(base + of_rows, tl.where(dead, float("inf"), b), mask=inside)


@triton.jit
def differences(s, dp, c, base, delta, seen, MISTAKE: tl.constexpr):
    """Step 10: P' and dS. `base` and `delta` broadcast against S."""
    n, e = split(s, c)
    seen = seen & (base != float("inf"))
    p = tl.where(seen, raised(e, n, base), 0.0)
    distance = dp
    if MISTAKE != NO_DELTA:
        distance = dp - delta
    return p, tl.where(seen, p * distance, 0.0)


@triton.jit(do_not_specialize=["tokens", "heads", "group"])
def backward_queries(
    q,
    q_scales,
    k,
    k_scales,
    v,
    v_scales,
    do,
    do_scales,
    base,
    delta,
    dq,
    starts,
    whole,
    tokens,
    heads,
    group,
    c,
    softmax_scale,
    pairs,
    blocks,
    dp_stage,
    p_stage,
    ds_stage,
    code_stage,
    scale_stage,
    CHANNELS: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    TRACE: tl.constexpr,
    MISTAKE: tl.constexpr,
):
    """Steps 10 and 11: dq [tokens, heads, channels] in bfloat16. One program a query tile."""
    head, document = tl.program_id(1), tl.program_id(2)
    kv_head = kv_head_of(head, heads, group, MISTAKE)
    start = tl.load(starts + document)
    length = tl.load(starts + document + 1) - start
    first = tl.program_id(0) * ROWS
    row = first + tl.arange(0, ROWS)
    inside = row < length
    q_tile = load_codes(q, start + row, inside, head, heads, CHANNELS, D)
    q_byte = of_blocks(load_scales(q_scales, start + row, inside, head, heads), ROWS, D)
    do_tile = load_codes(do, start + row, inside, head, heads, CHANNELS, D)
    do_byte = of_blocks(load_scales(do_scales, start + row, inside, head, heads), ROWS, D)
    of_rows = head * tokens + start + row
    base_row = tl.load(base + of_rows, mask=inside, other=0.0)
    delta_row = tl.load(delta + of_rows, mask=inside, other=0.0)
    unit = tl.full([D, KEYS // BLOCK], 127, tl.uint8)

    total = tl.zeros([ROWS, D], tl.float32)
    stop = length
    if CAUSAL and MISTAKE != MASK_OFF_BY_ONE:
        stop = tl.where(tl.load(whole + document) != 0, length, tl.minimum(length, first + ROWS))
    stop = tl.where(first < length, stop, 0)
    begin = 0
    if MISTAKE == DOCUMENTS_JOINED:
        begin = -KEYS
    for at in range(begin, stop, KEYS):
        key = at + tl.arange(0, KEYS)
        there = (key < length) & (start + key >= 0)
        of_key = key
        if MISTAKE == NEIGHBOUR_SCALE:
            of_key = tl.minimum(key + 1, length - 1)
        k_tile = load_codes(k, start + key, there, kv_head, heads // group, CHANNELS, D)
        k_byte = load_scales(k_scales, start + of_key, there, kv_head, heads // group)
        v_tile = load_codes(v, start + key, there, kv_head, heads // group, CHANNELS, D)
        v_byte = load_scales(v_scales, start + key, there, kv_head, heads // group)
        zero = tl.zeros([ROWS, KEYS], tl.float32)
        s = scaled_dot(q_tile, q_byte, tl.trans(k_tile), of_blocks(k_byte, KEYS, D), zero)
        dp = scaled_dot(do_tile, do_byte, tl.trans(v_tile), of_blocks(v_byte, KEYS, D), zero)
        seen = seen_pairs(row[:, None], key[None, :], length, start, CAUSAL, MISTAKE)
        p, ds = differences(s, dp, c, base_row[:, None], delta_row[:, None], seen, MISTAKE)
        codes, byte = encode_blocks(ds * of_byte(k_byte)[None, :], ROWS, KEYS, False)
        total = scaled_dot(codes, byte, k_tile, unit, total)
        if TRACE:
            place = (
                tl.load(pairs + document) + (head * length + row[:, None]) * length + key[None, :]
            )
            legal = inside[:, None] & (key < length)[None, :] & (key >= 0)[None, :]
            tl.store(dp_stage + place, dp, mask=legal)
            tl.store(p_stage + place, p, mask=legal)
            tl.store(ds_stage + place, ds, mask=legal)
            tl.store(code_stage + place, codes, mask=legal)
            count = (length + BLOCK - 1) // BLOCK
            block = (at // BLOCK) + tl.arange(0, KEYS // BLOCK)
            place = (
                tl.load(blocks + document) + (head * length + row[:, None]) * count + block[None, :]
            )
            legal = inside[:, None] & (block < count)[None, :] & (block >= 0)[None, :]
            tl.store(scale_stage + place, byte, mask=legal)

    channel = tl.arange(0, D)
    place = ((start + row[:, None]).to(tl.int64) * heads + head) * CHANNELS + channel[None, :]
    legal = inside[:, None] & (channel < CHANNELS)[None, :]
    tl.store(dq + place, bfloat16(total * softmax_scale), mask=legal)


@triton.jit(do_not_specialize=["tokens", "heads", "group"])
def backward_keys(
    q,
    q_scales,
    k,
    k_scales,
    v,
    v_scales,
    do,
    do_scales,
    base,
    delta,
    dk,
    dv,
    starts,
    whole,
    tokens,
    heads,
    group,
    c,
    pairs,
    blocks,
    p_code_stage,
    p_scale_stage,
    ds_code_stage,
    ds_scale_stage,
    CHANNELS: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    TRACE: tl.constexpr,
    MISTAKE: tl.constexpr,
):
    """Steps 10 and 12 up to the sum over heads: float32 [tokens, query heads, channels]. One program a key tile.

    Everything is transposed: a row of these tiles is a key, whose blocks are 32 queries.
    """
    head, document = tl.program_id(1), tl.program_id(2)
    kv_head = kv_head_of(head, heads, group, MISTAKE)
    start = tl.load(starts + document)
    length = tl.load(starts + document + 1) - start
    first = tl.program_id(0) * KEYS
    key = first + tl.arange(0, KEYS)
    there = key < length
    of_key = key
    if MISTAKE == NEIGHBOUR_SCALE:
        of_key = tl.minimum(key + 1, length - 1)
    k_tile = load_codes(k, start + key, there, kv_head, heads // group, CHANNELS, D)
    k_byte = load_scales(k_scales, start + of_key, there, kv_head, heads // group)
    k_byte = of_blocks(k_byte, KEYS, D)
    v_tile = load_codes(v, start + key, there, kv_head, heads // group, CHANNELS, D)
    v_byte = of_blocks(load_scales(v_scales, start + key, there, kv_head, heads // group), KEYS, D)
    unit = tl.full([D, ROWS // BLOCK], 127, tl.uint8)

    dk_total = tl.zeros([KEYS, D], tl.float32)
    dv_total = tl.zeros([KEYS, D], tl.float32)
    begin = 0
    if CAUSAL and MISTAKE != MASK_OFF_BY_ONE:
        begin = tl.where(tl.load(whole + document) != 0, 0, first // ROWS * ROWS)
    for at in range(begin, tl.where(first < length, length, 0), ROWS):
        row = at + tl.arange(0, ROWS)
        inside = row < length
        limit = length
        if MISTAKE == STALE_PADDING:
            inside = start + row < tokens
            limit = tokens - start
        q_tile = load_codes(q, start + row, inside, head, heads, CHANNELS, D)
        q_byte = load_scales(q_scales, start + row, inside, head, heads)
        do_tile = load_codes(do, start + row, inside, head, heads, CHANNELS, D)
        do_byte = load_scales(do_scales, start + row, inside, head, heads)
        of_rows = head * tokens + start + row
        base_row = tl.load(base + of_rows, mask=inside, other=0.0)
        delta_row = tl.load(delta + of_rows, mask=inside, other=0.0)
        zero = tl.zeros([KEYS, ROWS], tl.float32)
        s = scaled_dot(k_tile, k_byte, tl.trans(q_tile), of_blocks(q_byte, ROWS, D), zero)
        dp = scaled_dot(v_tile, v_byte, tl.trans(do_tile), of_blocks(do_byte, ROWS, D), zero)
        seen = seen_pairs(row[None, :], key[:, None], limit, start, CAUSAL, MISTAKE)
        seen = seen & there[:, None]
        p, ds = differences(s, dp, c, base_row[None, :], delta_row[None, :], seen, MISTAKE)
        p_codes, p_byte = encode_blocks(p * of_byte(do_byte)[None, :], KEYS, ROWS, False)
        ds_codes, ds_byte = encode_blocks(ds * of_byte(q_byte)[None, :], KEYS, ROWS, False)
        dv_total = scaled_dot(p_codes, p_byte, do_tile, unit, dv_total)
        dk_total = scaled_dot(ds_codes, ds_byte, q_tile, unit, dk_total)
        if TRACE:
            place = (
                tl.load(pairs + document) + (head * length + row[None, :]) * length + key[:, None]
            )
            legal = there[:, None] & (row < length)[None, :]
            tl.store(p_code_stage + place, p_codes, mask=legal)
            tl.store(ds_code_stage + place, ds_codes, mask=legal)
            count = (length + BLOCK - 1) // BLOCK
            block = (at // BLOCK) + tl.arange(0, ROWS // BLOCK)
            place = (
                tl.load(blocks + document) + (head * count + block[None, :]) * length + key[:, None]
            )
            legal = there[:, None] & (block < count)[None, :]
            tl.store(p_scale_stage + place, p_byte, mask=legal)
            tl.store(ds_scale_stage + place, ds_byte, mask=legal)

    channel = tl.arange(0, D)
    place = ((start + key[:, None]).to(tl.int64) * heads + head) * CHANNELS + channel[None, :]
    legal = there[:, None] & (channel < CHANNELS)[None, :]
    tl.store(dk + place, dk_total, mask=legal)
    tl.store(dv + place, dv_total, mask=legal)


@triton.jit(do_not_specialize=["elements", "group"])
def add_heads(parts, gradient, elements, factor, group, CHANNELS: tl.constexpr, SIZE: tl.constexpr):
    """The end of step 12: the sums over a group's heads, ascending, times `factor`, in bfloat16."""
    place = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    inside = place < elements
    first = place // CHANNELS * group * CHANNELS + place % CHANNELS
    total = tl.load(parts + first, mask=inside, other=0.0)
    for one in range(1, group):
        total = total + tl.load(parts + first + one * CHANNELS, mask=inside, other=0.0)
    tl.store(gradient + place, bfloat16(total * factor), mask=inside)
