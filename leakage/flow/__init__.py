"""Information flow through a JAX program: which inputs each element of its results may depend on.

`Interpreter(Context(Sets(n))).run(jaxpr, operands)` runs a program on abstract arrays (`value.Flow`). Each element is
known, with its value, or depends on a set of sources; sets are kept once and named by numbers (`sets`). A source is
whatever the caller says: an element, a token. A result is sound: changing a source changes no element whose set does
not hold it, for inputs that keep to what was assumed. It is a statement on the program as written, for one shape, not
on the order in which a compiler or a device evaluates it.

| primitives | rule | module |
|---|---|---|
| elementwise | union of the operands, of the same element | `elementwise` |
| products, `and`, `or`, sums, comparisons | what known operands decide alone: 0 x, infinity + x | `deciding` |
| `select_n` | the case that a known predicate names; else all cases and the predicate | `elementwise` |
| reshape, transpose, slice, concatenate, pad, bitcast | elements move; parts of a number see all of it | `structural` |
| integers that share no bit, put together | bit fields: a code that is unpacked sees itself alone | `fields` |
| reductions, running reductions, sort, `top_k` | union along the axis, known elements aside | `reduction` |
| `dot_general`, convolutions | products of which no factor is known to be 0 | `contraction`, `windows` |
| gather, `dynamic_slice`, scatter | a move; from or to unknown places, of all that may be | `indexing`, `scattering` |
| `scan`, `while`, `cond` | followed where what steers them is known; else joined, and that | `control` |
| jit, custom derivatives, checkpoints | looked into | `interpreter` |
| `shard_map` | each device by itself; devices that exchange data are refused by name | `manual` |
| `pallas_call` | the plain program that Pallas's interpreter makes of the kernel | `kernels` |
| keys of random numbers | never known; bits see their key | `random_bits` |
| `fused_sum` of this package | one rule, equal to what its own program says | `tensor_core` |
| callbacks to Python, arrays written in place | refused: `context.Refused` | `interpreter` |
| any other | all results depend on all operands, recorded in `Context.unknown` | `interpreter` |

**Assumed**, unless `Context.strict`, and counted in elements: `context.Assumption`. The sign of a zero is not looked
at.

**Over-approximated**: values that cancel (x - x), saturate or do not reach a comparison; scatters and updates at
unknown places; loops of unknown length; sums of known floats of several roundings, and random numbers of a known key,
which are of no source but not known.

**Bounds**: with `Context.fine`, what numbers lie between is followed too (`bounds`), so that a maximum, a clip or a
comparison of small integers may be decided. Integer arithmetic that aligns exponents needs it; it costs time.

`_primitive.special` marks tests for NaN, infinity and negative zero, which are false unless strict;
`_primitive.shortcut` marks the choice between two ways to one result, of which the general one is followed.
"""
