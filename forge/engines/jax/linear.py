"""Products of activations with stored weights, as fast as the platform at hand does them.

Knows no model and no layers. Weights stay as a checkpoint has them: [n, k], one row an output.

On a CPU, XLA (jaxlib 0.10.2) hands products of matrices to YNNPACK, which repacks its second factor
at every call, and that must not be the weights: so they come first, and a barrier keeps XLA from
swapping the factors back. Milliseconds of processor time (2 cores of an AMD EPYC, Zen 4, the least
of 7 calls on a busy machine) for one pass over 302 MB of weights of 1536 x 6144 and 6144 x 1536:

| rows | f32 here | f32 "mk,nk->mn" | f32 x @ w, w [k, n] | bf16 here (151 MB) | bf16 as f32 is |
|---|---|---|---|---|---|
| 1 | 12 | 13 | 17 | 22 | 184 |
| 2 | 16 | 50 | 36 | 22 | 169 |
| 4 | 15 | 51 | 33 | 24 | 161 |
| 8 | 19 | 59 | 39 | 25 | 188 |
| 16 | 29 | 75 | 48 | 32 | 192 |
| 64 | 100 | 141 | 124 | 84 | 267 |

bf16 is the other way round: only as "mk,nk->mn" with two rows or more does YNNPACK take it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from forge.engines.jax.quantised import (
    Int8Weight,
    PackedWeight,
    Weight,
    int8_product,
    packed_product,
)


def project(x: jax.Array, w: Weight) -> jax.Array:
    """x [..., k] times the transpose of w [n, k]: [..., n] f32.

    x is rounded to w's dtype; sums are f32. A row's result depends on no other row, and not on
    which row it is.
    """
    rows = x.reshape(-1, x.shape[-1])
    if isinstance(w, PackedWeight):
        product = packed_product(rows, w)
    elif isinstance(w, Int8Weight):
        product = int8_product(rows, w)
    else:
        product = _project_plain(rows, w)
    return product.reshape(*x.shape[:-1], w.shape[0])


def _project_plain(x: jax.Array, w: jax.Array) -> jax.Array:
    """x [rows, k] with stored weights as they are."""
    rows = x.astype(w.dtype)
    on_cpu = _project_bf16_on_cpu if w.dtype == jnp.bfloat16 else _project_on_cpu
    product: jax.Array = lax.platform_dependent(rows, w, cpu=on_cpu, default=_project_plainly)
    return product


def _project_plainly(rows: jax.Array, w: jax.Array) -> jax.Array:
    """One product, its layout and tiling left to the compiler.

    f32 means f32: chips with matrix units would else round the factors to fewer bits.
    """
    precision = lax.Precision.HIGHEST if w.dtype == jnp.float32 else lax.Precision.DEFAULT
    return jnp.einsum("mk,nk->mn", rows, w, precision=precision, preferred_element_type=jnp.float32)


def _project_on_cpu(rows: jax.Array, w: jax.Array) -> jax.Array:
    """Weights first; without the barrier XLA folds the transposition into the product."""
    product = lax.dot_general(w, rows, (((1,), (1,)), ((), ())))
    kept: jax.Array = lax.optimization_barrier(product)  # type: ignore[no-untyped-call]
    return kept.T


def _project_bf16_on_cpu(rows: jax.Array, w: jax.Array) -> jax.Array:
    """At least two rows, for YNNPACK takes no single one."""
    count = rows.shape[0]
    padded = jnp.pad(rows, ((0, max(2 - count, 0)), (0, 0)))
    return _project_plainly(padded, w)[:count]
