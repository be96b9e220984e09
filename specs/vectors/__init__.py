"""Cases to test a client with; `nous-node conformance` loads them (CC0 1.0)."""
