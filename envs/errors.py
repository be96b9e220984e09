"""The errors of environments: each text is one sentence saying what was wrong and what to do next.

    NousError
    └── LocalError
        └── EnvError
            ├── UnknownEnvironment   no installed package offers it
            ├── BrokenEnvironment    it is installed and cannot be imported or made
            ├── BadConfig            a key or value of its config that it does not take
            ├── CannotStart          this machine cannot start the process that it would run in
            ├── ChildEnded           its process ended, broke a rule, or was ended at a deadline; see `child`
            ├── BadChat              a model's conversation format that cannot be extended token by token
            └── EnvironmentFailed    it was running: it raised, hung, or broke the rules of a session
                └── Interrupted      another one in its process did, more than once: not its fault

A group whose environment failed is given up by a volunteer. At the verifier the same failure is a
RemoteError(ENVIRONMENT_FAILED), see `replay`. BrokenEnvironment and CannotStart are nobody's fault but this
machine's: a trainer stops with them.
"""

from __future__ import annotations

from nous_node.protocol.errors import LocalError


class EnvError(LocalError):
    """Any error of an environment."""


class UnknownEnvironment(EnvError):
    """No installed package offers an environment of this name or version."""


class BrokenEnvironment(EnvError):
    """An environment is installed and cannot be imported or made."""


class BadConfig(EnvError):
    """A key or a value in an environment's config that it does not take."""


class BadChat(EnvError):
    """A model's conversation format is missing, hostile, or cannot be extended token by token."""


class CannotStart(EnvError):
    """This machine cannot start the process that an environment runs in."""


class EnvironmentFailed(EnvError):
    """A running environment raised, hung, or broke the rules of a session."""


class Interrupted(EnvironmentFailed):
    """A group was at work when others ended the process that it shares with them."""
