"""A node: network, roles and the command line.

Nothing is imported here: `nous-node --help` and the relay never pay for torch.
"""
