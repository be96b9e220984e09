"""What the network layer raises.

LocalError
├── AddressError             not a multiaddr that we can use
├── ListenError              the port is taken or the interface does not exist
├── UnreachableError         nobody answered at the address in time, or somebody else did
├── NotConnectedError        a request to a peer that we have no connection to
├── OversizePublishError     a message above the gossip limit
├── NoSubscribersError       nobody that we know reads the topic
└── TopicTakenError          subscribed twice
RemoteError
└── RequestFailedError       a peer did not answer a request properly
    ├── UnsupportedProtocolError
    ├── RequestTimeoutError
    └── OversizeResponseError
"""

from __future__ import annotations

from nous_node.protocol.errors import Code, LocalError, RemoteError


class AddressError(LocalError):
    """The text is not an address of a peer that we can dial."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(
            f"Cannot use the address {address!r}: {reason}. "
            "It looks like /ip4/192.0.2.7/tcp/4001/p2p/12D3Koo..."
        )
        self.address = address


class ListenError(LocalError):
    """We cannot listen there."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"Cannot listen on {address}: {reason}. Choose another port or address.")
        self.address = address


class UnreachableError(LocalError):
    """No connection came about."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(
            f"Cannot reach {address}: {reason}. Check that the peer runs and that nothing blocks the way."
        )
        self.address = address


class NotConnectedError(LocalError):
    """A request needs a connection first."""

    def __init__(self, peer: str) -> None:
        super().__init__(f"Not connected to {peer}. Connect to one of its addresses first.")
        self.peer = peer


class OversizePublishError(LocalError):
    """Others would drop it without a word, so it is not sent."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(
            f"A message of {size} bytes is above the gossip limit of {limit} bytes and was not sent. "
            "Send its hash and serve the body."
        )
        self.size = size
        self.limit = limit


class NoSubscribersError(LocalError):
    """The message would reach nobody, so it is not sent."""

    def __init__(self, topic: str) -> None:
        super().__init__(
            f"None of the connected peers reads {topic}, so nothing was sent. Try again when one does."
        )
        self.topic = topic


class TopicTakenError(LocalError):
    """One topic has one judge."""

    def __init__(self, topic: str) -> None:
        super().__init__(f"{topic} is subscribed already. Leave it before subscribing again.")
        self.topic = topic


class DiscoveryError(LocalError):
    """The local network cannot be searched."""

    def __init__(self, interface: str, reason: str) -> None:
        super().__init__(
            f"Cannot look for runs through the interface {interface}: {reason}. "
            "Use an invite: `nous-node join INVITE`."
        )


class RequestFailedError(RemoteError):
    """A peer did not answer a request properly; ask another one."""

    def __init__(self, peer: str, reason: str, code: Code = Code.MALFORMED) -> None:
        super().__init__(code, f"The request to {peer} failed: {reason}.")
        self.peer = peer


class UnsupportedProtocolError(RequestFailedError):
    """The peer does not serve this protocol."""

    def __init__(self, peer: str, protocol: str) -> None:
        super().__init__(peer, f"it does not serve {protocol}", Code.NOT_FOUND)


class RequestTimeoutError(RequestFailedError):
    """The peer did not answer within the deadline."""

    def __init__(self, peer: str, seconds: float) -> None:
        super().__init__(peer, f"no complete answer came within {seconds:g} s", Code.BUSY)


class OversizeResponseError(RequestFailedError):
    """The peer announced more than we asked for."""

    def __init__(self, peer: str, size: int, limit: int) -> None:
        super().__init__(peer, f"it announced {size} bytes, the limit is {limit}", Code.OVERSIZE)
