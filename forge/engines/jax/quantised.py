"""Matrices that lie on the device as integers with scales, and products with them.

Knows no model, no files and no layers. Packed ones are 4-bit integers of a checkpoint, whose values
are exact; 8-bit ones are made of plain matrices, and near them.

Packed words lie turned, inputs first. On a TPU the eight integers of a word are then one tile's
rows, and the outputs its lanes: unpacking is part of the product, and no unpacked matrix is in
memory. Scales are spread over words and not over weights, for libtpu (0.0.42, for a v5e) spreads
them outside of the product: an eighth of it.

On a CPU, XLA (jaxlib 0.10.2) works unpacked values out anew for every row if it may fuse them into
the product, and the matrix multiplier takes f32 only as it lies. So a block is unpacked behind a
barrier, multiplied, and the next one takes its place. Milliseconds for one matrix of 9.4 million
weights, the least of 9 calls, 2 cores of an AMD EPYC, Zen 4, that others used as well:

| rows | f32 | packed, in blocks | packed, as one | int8, in blocks | int8, as one |
|---|---|---|---|---|---|
| 1 | 1.2 | 2.3 | 26 | 0.9 | 14 |
| 4 | 1.7 | 2.9 | 42 | 1.8 | 29 |
| 16 | 2.1 | 5.2 | 30 | 3.8 | 21 |
| 256 | 47 | 50 | 104 | 56 | 67 |
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_PACKED_BITS, _PACKED_ZERO = 4, 8  # an integer is stored with 8 added
_PACKED_BLOCK = 512  # inputs that are unpacked at once on a CPU
_INT8_BLOCK = 256  # outputs that are converted at once on a CPU
_INT8_MOST = 127
_BF16_BITS = (8, 7)  # of exponent and mantissa


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedWeight:
    """A matrix [n, k] of 4-bit integers, turned: words uint32 [k/8, n], scales bf16 [k/group, n].

    `dtype` is that of the plain weights beside it, to which activations are rounded.
    """

    turned_words: jax.Array
    turned_scales: jax.Array
    dtype: Any = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix that it stands for."""
        per_word = 32 // _PACKED_BITS
        return self.turned_words.shape[1], self.turned_words.shape[0] * per_word


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8Weight:
    """Matrices [..., n, k] as rows int8 [..., n, k] times scales f32 [..., n].

    `dtype` is that of the plain weights beside it, to which activations are rounded.
    """

    rows: jax.Array
    scales: jax.Array
    dtype: Any = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows.shape


Weight = jax.Array | PackedWeight | Int8Weight


def quantised_rows(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(int8 [..., n, k], f32 scales [..., n]): each row's largest value becomes 127 or -127.

    A weight is off by at most half a scale, 1/254 of its row's largest.
    """
    flat = matrix.reshape(-1, matrix.shape[-1])
    integers = np.empty(flat.shape, np.int8)
    scales = np.empty(len(flat), np.float32)
    step = max(1, (1 << 22) // flat.shape[1])  # rows at once: a matrix in f32 may be large
    for at in range(0, len(flat), step):
        rows = flat[at : at + step].astype(np.float32)
        most = np.abs(rows).max(axis=1) / _INT8_MOST
        most[most == 0] = 1.0  # a row of zeros
        scales[at : at + step] = most
        integers[at : at + step] = np.rint(rows / most[:, None])
    return integers.reshape(matrix.shape), scales.reshape(matrix.shape[:-1])


def unpacked_block(words: jax.Array, scales: jax.Array) -> jax.Array:
    """[k, n] f32 of words [k/8, n] and scales [k/group, n]: what compressed-tensors unpacks.

    An integer times a scale is exact in f32, so that rounding it to bf16 is the only rounding. It
    is asked for by name, for XLA may leave out a conversion to bf16 and back.
    """
    shifts = np.arange(0, 32, _PACKED_BITS, dtype=np.uint32)
    shifted = words[:, None, :] >> shifts[None, :, None]
    integers = (shifted & 15).astype(jnp.int32) - _PACKED_ZERO
    # One for each word, and not for each weight: see above. XLA would else make one spread of two.
    of_words = jnp.repeat(scales.astype(jnp.float32), words.shape[0] // scales.shape[0], axis=0)
    of_words = lax.optimization_barrier(of_words)  # type: ignore[no-untyped-call]
    rounded: jax.Array = lax.reduce_precision(integers * of_words[:, None, :], *_BF16_BITS)
    return rounded.reshape(-1, words.shape[1])


def packed_product(x: jax.Array, w: PackedWeight) -> jax.Array:
    """x [rows, k] times the transpose of w: [rows, n] f32, with f32 sums."""

    def on_cpu(x: jax.Array, w: PackedWeight) -> jax.Array:
        outputs, inputs = w.shape
        group = inputs // w.turned_scales.shape[0]
        block = math.gcd(inputs, max(_PACKED_BLOCK, group))

        def add(number: jax.Array, total: jax.Array) -> jax.Array:
            at = number * block
            unpacked = unpacked_block(
                lax.dynamic_slice_in_dim(w.turned_words, at // 8, block // 8),
                lax.dynamic_slice_in_dim(w.turned_scales, at // group, block // group),
            )
            kept: jax.Array = lax.optimization_barrier(unpacked)  # type: ignore[no-untyped-call]
            return total + lax.dynamic_slice_in_dim(x, at, block, axis=1) @ kept

        total = jnp.zeros((x.shape[0], outputs), jnp.float32)
        summed: jax.Array = lax.fori_loop(0, inputs // block, add, total)
        return summed

    def plainly(x: jax.Array, w: PackedWeight) -> jax.Array:
        unpacked = unpacked_block(w.turned_words, w.turned_scales).astype(w.dtype)
        return _whole_product("mk,kn->mn", x.astype(w.dtype), unpacked)

    product: jax.Array = lax.platform_dependent(
        _rounded_rows(x, w.dtype), w, cpu=on_cpu, default=plainly
    )
    return product


def int8_product(x: jax.Array, w: Int8Weight) -> jax.Array:
    """x [rows, k] times the transpose of w [n, k]: [rows, n] f32, with f32 sums.

    The integers are exact in any dtype; a row's scale comes after its sum.
    """

    def on_cpu(x: jax.Array, w: Int8Weight) -> jax.Array:
        outputs = w.rows.shape[0]
        block = math.gcd(outputs, _INT8_BLOCK)

        def put(number: jax.Array, products: jax.Array) -> jax.Array:
            at = number * block
            rows = lax.dynamic_slice_in_dim(w.rows, at, block).astype(jnp.float32)
            kept: jax.Array = lax.optimization_barrier(rows)  # type: ignore[no-untyped-call]
            product = lax.dot_general(kept, x, (((1,), (1,)), ((), ())))
            return lax.dynamic_update_slice_in_dim(products, product, at, 0)

        products = jnp.zeros((outputs, x.shape[0]), jnp.float32)
        whole: jax.Array = lax.fori_loop(0, outputs // block, put, products)
        return whole.T

    def plainly(x: jax.Array, w: Int8Weight) -> jax.Array:
        return _whole_product("mk,nk->mn", x.astype(w.dtype), w.rows.astype(w.dtype))

    product: jax.Array = lax.platform_dependent(
        _rounded_rows(x, w.dtype), w, cpu=on_cpu, default=plainly
    )
    return product * w.scales


def _rounded_rows(x: jax.Array, dtype: Any) -> jax.Array:
    """x as f32, with the values that it has in `dtype`."""
    if dtype == jnp.bfloat16:
        rounded: jax.Array = lax.reduce_precision(x, *_BF16_BITS)
        return rounded
    return x


def _whole_product(axes: str, x: jax.Array, w: jax.Array) -> jax.Array:
    """One product with f32 sums; f32 factors keep all their bits on chips that would cut them."""
    precision = lax.Precision.HIGHEST if w.dtype == jnp.float32 else lax.Precision.DEFAULT
    return jnp.einsum(axes, x, w, precision=precision, preferred_element_type=jnp.float32)
