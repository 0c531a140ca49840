"""The logarithms of the probabilities of some tokens of each row, and the entropy of the row.

Logits x of a row are divided by a temperature: z = x / T. Of a row (m, d) is its pair, d = Σ e^(z - m), and h its entropy,
h = -Σ p ln p = ln d + Σ e^(z - m) · (m - z) / d, a sum of numbers that are not negative. These three are what there is of a row:

    ln p of token t    (z_t - m) - ln d
    gradient of x      (Σ g_t · (1 where x is that of t) - p · (Σ g_t + g_h · (ln p + h))) / T

where g_t are the gradients of logarithms, of which there may be several for one token, and g_h that of the entropy.

On a GPU all three are found in one read of the logits. On a CPU the entropy is a second read, for a sum whose terms need m.
"""

from .direct import token_log_probs, token_log_probs_backward
from .row import Asked
