"""A line between two nodes that can be cut and mended: a TCP proxy in a thread."""

from __future__ import annotations

import threading
from contextlib import suppress

import trio

BLOCK = 1 << 16


class Proxy:
    """Listens on `port` of 127.0.0.1 and passes bytes to another one, until it is cut."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._whole = True
        self._ready = threading.Event()
        self._thread = threading.Thread(target=trio.run, args=(self._run,), daemon=True)
        self._thread.start()
        assert self._ready.wait(10)

    def cut(self) -> None:
        """Ends all connections, and every new one at once."""
        trio.from_thread.run_sync(self._set, False, trio_token=self._token)

    def heal(self) -> None:
        trio.from_thread.run_sync(self._set, True, trio_token=self._token)

    def close(self) -> None:
        trio.from_thread.run_sync(self._everything.cancel, trio_token=self._token)
        self._thread.join(10)

    async def _run(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._lines: set[trio.CancelScope] = set()
        with trio.CancelScope() as self._everything:
            (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
            self.port = listener.socket.getsockname()[1]
            self._ready.set()
            await trio.serve_listeners(self._serve, [listener])

    def _set(self, whole: bool) -> None:
        self._whole = whole
        for line in self._lines if not whole else ():
            line.cancel()

    async def _serve(self, near: trio.SocketStream) -> None:
        if not self._whole:
            return
        with suppress(OSError), trio.CancelScope() as line:
            self._lines.add(line)
            far = await trio.open_tcp_stream("127.0.0.1", self._target)
            async with far, trio.open_nursery() as nursery:
                nursery.start_soon(_pass_on, near, far, line)
                nursery.start_soon(_pass_on, far, near, line)
        self._lines.discard(line)


async def _pass_on(source: trio.SocketStream, sink: trio.SocketStream, line: trio.CancelScope) -> None:
    with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        while data := await source.receive_some(BLOCK):
            await sink.send_all(data)
    line.cancel()
