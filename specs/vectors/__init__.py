"""Cases to test a client with, as `nous-node conformance` loads them; made by `make vectors` (public domain, CC0 1.0)."""
