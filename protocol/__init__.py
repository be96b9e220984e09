"""The wire protocol without I/O: bytes, time and entropy are arguments, events are results.

Nothing here opens, sleeps, logs or draws entropy. `specs/` says the same in words, and the vectors in
`specs/vectors/` are made from this package.
"""
