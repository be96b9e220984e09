"""One stream of py-libp2p as it is (Noise, Yamux, TCP), for `bench_swarm.py`: nothing is hashed or kept.

python swarm_stock.py '{"bytes": 269000000}'                         # serves
python swarm_stock.py '{"bytes": 269000000, "peer": "/ip4/..."}'     # fetches
"""

from __future__ import annotations

import json
import sys

import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as new_noise_keys
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.security.noise.transport import PROTOCOL_ID, Transport
from multiaddr import Multiaddr

PROTOCOL = "/bench/bytes"
PIECE = 1 << 20


def host(seed: bytes):
    pair = create_new_key_pair(seed)
    noise = Transport(pair, noise_privkey=new_noise_keys().private_key)
    return new_host(key_pair=pair, sec_opt={PROTOCOL_ID: noise}, muxer_preference="YAMUX")


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


async def serve(size: int) -> None:
    async def send(stream) -> None:
        await stream.read(2)
        piece = bytes(PIECE)
        for start in range(0, size, PIECE):
            await stream.write(piece[: min(PIECE, size - start)])
        await stream.close()

    server = host(b"s" * 32)
    async with server.run(listen_addrs=[Multiaddr("/ip4/127.0.0.1/tcp/0")]):
        server.set_stream_handler(PROTOCOL, send)
        say(address=str(server.get_addrs()[0]))
        await trio.sleep_forever()


async def fetch(size: int, peer: str) -> None:
    client = host(b"c" * 32)
    async with client.run(listen_addrs=[]):
        info = info_from_p2p_addr(Multiaddr(peer))
        await client.connect(info)
        say(ready=True)
        await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)
        stream = await client.new_stream(info.peer_id, [PROTOCOL])
        await stream.write(b"go")
        got = 0
        while got < size:
            data = await stream.read(PIECE)
            if not data:
                raise RuntimeError(f"the stream ended after {got} bytes")
            got += len(data)
        say(got=got)
        await trio.sleep_forever()


if __name__ == "__main__":
    plan = json.loads(sys.argv[1])
    if "peer" in plan:
        trio.run(fetch, plan["bytes"], plan["peer"])
    else:
        trio.run(serve, plan["bytes"])
