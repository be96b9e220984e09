"""Says one word and then spins: it does not notice that its pipe is closed."""

import os

os.write(1, b"\x00\x00\x00\x03\xa2hi")
while True:
    pass
