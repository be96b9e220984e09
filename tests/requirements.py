"""Prints what pyproject.toml asks for: dependencies and the dev and envs extras, one a line.

The Makefile installs these before the package is built, so that a change of our code
never re-resolves torch.
"""

import tomllib
from pathlib import Path

project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
extras = project["optional-dependencies"]
print("\n".join(project["dependencies"] + extras["dev"] + extras["envs"]))
