"""Tells what is seen of a home from the virtual environment inside of it, which has no other package."""

import errno
import os

import mine

seen = f"home: {os.listdir(mine.home)} envs: {os.listdir(os.path.join(mine.home, 'envs'))}"
try:
    os.mkdir(os.path.join(mine.home, "new"))
except OSError as error:
    seen += f" new: {'read-only' if error.errno == errno.EROFS else error}"
raise SystemExit(seen)
