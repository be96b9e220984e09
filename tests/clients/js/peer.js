// The libp2p host of a client (chapter 03): connections, streams of one frame each way, gossip.
import { setTimeout as sleep } from 'node:timers/promises'
import { noise } from '@chainsafe/libp2p-noise'
import { yamux } from '@chainsafe/libp2p-yamux'
import { generateKeyPairFromSeed } from '@libp2p/crypto/keys'
import { gossipsub } from '@libp2p/gossipsub'
import { identify } from '@libp2p/identify'
import { tcp } from '@libp2p/tcp'
import { multiaddr } from '@multiformats/multiaddr'
import { createLibp2p } from 'libp2p'

Promise.withResolvers ??= function () { // libp2p asks for it, Node.js 20 lacks it
  let ends
  const promise = new this((resolve, reject) => (ends = { resolve, reject }))
  return { promise, ...ends }
}
const piece = 16_384, within = (seconds) => ({ signal: AbortSignal.timeout(1000 * seconds) })

// One frame of at most `limit` bytes; whoever is too slow, in all or for a piece of it, loses the stream.
async function readFrame(stream, limit, seconds) {
  const late = (after) => setTimeout(() => stream.abort(new Error('too slow')), 1000 * after)
  let [parts, size, length, whole, stall] = [[], 0, Infinity, late(seconds)]
  try {
    for await (const part of stream) {
      parts.push(part.subarray())
      stall ??= late(10)
      if (Math.floor(size / piece) < Math.floor((size += part.byteLength) / piece)) stall.refresh()
      if (length === Infinity && size >= 4) length = Buffer.concat(parts).readUInt32BE()
      if (length < Infinity && length > limit) throw new Error('a frame beyond its limit')
      if (size >= 4 + length) return Buffer.concat(parts).subarray(4, 4 + length)
    }
    throw new Error('a frame that was cut short')
  } finally {
    clearTimeout(whole)
    clearTimeout(stall)
  }
}

async function writeFrame(stream, payload) {
  const frame = Buffer.concat([Buffer.alloc(4), payload])
  frame.writeUInt32BE(payload.length)
  for (let at = 0; at < frame.length; at += piece) {
    if (!stream.send(frame.subarray(at, at + piece))) await stream.onDrain(within(10))
  }
  await stream.close(within(10)) // the writing side only
}

export class Peer {
  /** A host whose key has this Ed25519 seed; it listens only where `listen` says so. */
  static async start(seed, listen = []) {
    const refused = new Map(), deny = (id) => refused.get(String(id)) > Date.now()
    const msgIdFn = ({ from, sequenceNumber }) =>
      Buffer.concat([from.toMultihash().bytes, Buffer.from(sequenceNumber.toString(16).padStart(16, '0'), 'hex')])
    const host = await createLibp2p({
      privateKey: await generateKeyPairFromSeed('Ed25519', seed), addresses: { listen }, transports: [tcp()],
      connectionEncrypters: [noise()], streamMuxers: [yamux({ keepAliveInterval: 10_000, maxInboundStreams: 64 })],
      connectionManager: { maxConnections: 128, dialTimeout: 10_000, inboundUpgradeTimeout: 5_000 },
      connectionGater: { denyDialMultiaddr: () => false, denyDialPeer: deny, denyInboundEncryptedConnection: deny },
      services: { identify: identify(), pubsub: gossipsub({ globalSignaturePolicy: 'StrictSign', fallbackToFloodsub: false, msgIdFn,
        maxInboundDataLength: 4 << 20, idontwantMinDataSize: piece }) },
    })
    await host.handle('/ipfs/ping/1.0.0', async (stream) => {
      for await (const part of stream) if (!stream.send(part)) await stream.onDrain(within(10))
      await stream.close(within(10))
    })
    host.addEventListener('connection:open', ({ detail: { remotePeer } }) => { // two of a peer are enough (NET-8)
      for (const old of host.getConnections(remotePeer).slice(0, -2)) old.close().catch(() => old.abort(new Error('one too many')))
    })
    return Object.assign(new Peer(), { host, refused, pubsub: host.services.pubsub, stopping: new AbortController(), rejects: new Map() })
  }
  /** Dials each peer of these addresses, and again when it is lost, until the client stops (NET-8). */
  keep(addresses) {
    const tcpOnly = addresses.filter((one) => /^\/(ip4|ip6|dns|dns4|dns6)\/[^/]+\/tcp\/\d+\/p2p\/[^/]+$/.test(one))
    for (const id of new Set(tcpOnly.map((one) => one.split('/').at(-1)))) this.#keep(tcpOnly.filter((one) => one.endsWith(`/${id}`)))
  }
  async #keep(addresses) {
    for (let wait = 0.5; !this.stopping.signal.aborted; wait = Math.min(15, 2 * wait)) {
      const begin = Date.now()
      const connection = await this.host.dial(addresses.map(multiaddr), within(10)).catch(() => undefined)
      if (connection?.status === 'open') await new Promise((lost) => connection.addEventListener('close', lost))
      if (connection && Date.now() - begin > 10_000) wait = 0.5
      await sleep(1000 * wait * (0.7 + 0.6 * Math.random()), undefined, this.stopping).catch(() => undefined)
    }
  }
  /** Ids of the connected peers, those that this host dialled first. */
  get peers() {
    const dialled = (id) => this.host.getConnections(id).some((one) => one.direction === 'outbound')
    return this.host.getPeers().sort((a, b) => dialled(b) - dialled(a))
  }
  get addresses() {
    return this.host.getMultiaddrs().map(String)
  }
  async ask(id, protocol, request, limit, seconds) {
    const stream = await this.host.getConnections(id)[0].newStream(protocol, within(seconds))
    try {
      await writeFrame(stream, request)
      return await readFrame(stream, limit, seconds)
    } finally {
      stream.abort(new Error('done'))
    }
  }
  serve(protocol, limit, most, answer) {
    let open = 0
    const handler = async (stream, { remotePeer }) => {
      open++
      try {
        await writeFrame(stream, await answer(await readFrame(stream, limit, 10), remotePeer, open))
      } catch (error) {
        stream.abort(error)
      }
      open--
    }
    return this.host.handle(protocol, handler, { maxInboundStreams: most })
  }
  /** Publishes without being subscribed; false where nobody listens. */
  async publish(topic, data) {
    if (data.length > 1_047_552) throw new Error('the message is larger than gossip takes') // libraries drop it silently
    return (await this.pubsub.publish(topic, data).catch(() => ({ recipients: [] }))).recipients.length > 0
  }
  /** `judge(data)` answers accept, ignore or reject (chapter 04); 20 rejects, and a forwarder is refused. */
  watch(topic, judge) {
    this.pubsub.topicValidators.set(topic, async (from, { data }) => {
      const verdict = await judge(data)
      const [count, since] = this.rejects.get(String(from)) ?? [0, Date.now()]
      const left = Math.max(0, count - (Date.now() - since) / 10_000) + (verdict === 'reject')
      this.rejects.set(String(from), [left, Date.now()])
      if (left >= 20) this.drop(from)
      return verdict
    })
    this.pubsub.subscribe(topic)
  }
  /** Ends the connections to a peer and refuses new ones for 300 s. */
  drop(id) {
    this.refused.set(String(id), Date.now() + 300_000)
    return this.host.hangUp(id).catch(() => undefined)
  }
  stop() {
    this.stopping.abort()
    return this.host.stop()
  }
}
