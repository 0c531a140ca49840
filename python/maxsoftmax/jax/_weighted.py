"""ln |Σ b · exp a| and its sign: one sum of what is positive, and one of what is negative, by the same kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp


def logsumexp(a: jax.Array, b: jax.Array, where: Any, plain: Callable[[jax.Array], jax.Array]) -> tuple[Any, Any]:
    """Returns the logarithm and the sign: 1, -1, 0 of no sum at all.

    Args:
        a: Logits, in accumulators.
        b: What exponentials are multiplied by: of their shape and dtype.
        where: Which elements count; all if None.
        plain: Returns ln Σ exp of an array of this shape along the axes.
    """
    absent = b == 0 if where is None else (b == 0) | ~where
    # What is absent has no change either: 0 times an infinite one would be NaN.
    terms = jnp.where(absent, 0, a) + jnp.log(jnp.abs(jnp.where(absent, 1, b)))
    gains, losses = (plain(jnp.where(absent | of, -np.inf, terms)) for of in (b < 0, ~(b < 0)))
    larger, smaller = (jnp.where(gains >= losses, *pair) for pair in ((gains, losses), (losses, gains)))
    alone = smaller == -np.inf
    less = jnp.log1p(-jnp.exp(jnp.where(alone, -1, smaller - larger)))
    unknown = jnp.isnan(gains) | jnp.isnan(losses)
    sign = jnp.where(gains > losses, 1, jnp.where(gains < losses, -1, 0)).astype(a.dtype)
    return jnp.where(unknown, jnp.nan, jnp.where(alone, larger, larger + less)), jnp.where(unknown, jnp.nan, sign)
