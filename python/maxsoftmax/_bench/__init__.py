"""`maxsoftmax bench`: every way to compute a softmax, on the same data, checked and timed by one protocol.

`cases.py` says what is measured, `providers/` who computes it, `protocol.py` how it is timed, `call.py` how
whole calls are, `apart.py` how each provider gets a process of its own, `results.py` what is kept, `table.py` and
`chart.py` how it is shown, and `published.py` what others measured, beside it.
"""
