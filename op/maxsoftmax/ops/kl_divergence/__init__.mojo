"""The KL divergence of the probabilities of one tensor's rows from those of another's: what distillation minimizes.

Logits of p and q are divided by a temperature, z = x / T. Of a row there are the pairs of both, (m, d) with d = Σ e^(z - m), and

    D(p | q) = Σ p (ln p - ln q) = Σ p (z_p - z_q) - (m_p - m_q) - ln d_p + ln d_q
    gradient of the logits of q     (q - p) / T
    gradient of the logits of p     p · (ln p - ln q - D) / T

Where p is 0 there is no term. Whether p or q is the student is up to the caller: both divergences, forward and reverse, and their
gradients by either tensor are the same two functions.

On a GPU a row's five numbers are found in one read of both tensors. On a CPU rows are taken some at a time, so that
their second and third read is of a cache.
"""

from .direct import kl_divergence, kl_divergence_backward
