"""Talks for ever and never says that it has started."""

from nous_node.envs import host_messages as said
from nous_node.envs.framing import ParentPipe

pipe: ParentPipe[said.FromHost, said.ToHost] = ParentPipe.take_over(said.ToHost)  # type: ignore[arg-type]
while True:
    pipe.send(said.Text("x"))
    pipe.send(said.Working(1))
