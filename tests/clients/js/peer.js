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
import { pack } from './shapes.js'

Promise.withResolvers ??= function () { // libp2p asks for it, Node.js 20 lacks it
  const ends = {}
  return Object.assign(ends, { promise: new this((resolve, reject) => Object.assign(ends, { resolve, reject })) })
}
const PIECE = 16384, MAX_RPC = 1 << 20, TCP = /^\/(ip4|ip6|dns[46]?)\/[^/]+\/tcp\/\d+\/p2p\/[^/]+$/
const within = (seconds) => ({ signal: AbortSignal.timeout(1000 * seconds) })

// The length is compared before what it announces is waited for. What has begun gets 10 s for each piece (STR-1).
async function readFrame(stream, limit, seconds) {
  const late = (time) => setTimeout(() => stream.abort(new Error('too slow')), 1000 * time)
  const parts = [], whole = late(seconds)
  let size = 0, length = Infinity, piece
  try {
    for await (const part of stream) {
      parts.push(part.subarray())
      piece ??= late(10)
      const pieces = Math.floor(size / PIECE)
      size += part.byteLength
      if (Math.floor(size / PIECE) > pieces) piece.refresh()
      if (length === Infinity && size >= 4) length = Buffer.concat(parts).readUInt32BE()
      if (size >= 4 && length > limit) break
      if (size >= 4 + length) return Buffer.concat(parts).subarray(4, 4 + length)
    }
    throw new Error('a frame that is cut short or beyond its limit')
  } finally {
    [whole, piece].forEach(clearTimeout)
  }
}
async function writeFrame(stream, payload) {
  const frame = Buffer.concat([Buffer.alloc(4), payload])
  frame.writeUInt32BE(payload.length)
  for (let at = 0; at < frame.length; at += PIECE)
    if (!stream.send(frame.subarray(at, at + PIECE))) await stream.onDrain(within(10))
  await stream.close(within(10)) // the writing side only
}

export class Peer {
  /** A host whose key has this Ed25519 seed; it listens only where `listen` says so. */
  static async start(seed, listen = []) {
    const refused = new Map(), deny = (id) => refused.get(String(id)) > Date.now()
    const msgIdFn = ({ from, sequenceNumber }) => // the library's own has two bytes less (NET-5)
      Buffer.concat([from.toMultihash().bytes, Buffer.from(sequenceNumber.toString(16).padStart(16, '0'), 'hex')])
    const pubsub = gossipsub({ globalSignaturePolicy: 'StrictSign', fallbackToFloodsub: false, msgIdFn,
      maxInboundDataLength: MAX_RPC, idontwantMinDataSize: PIECE,
      scoreParams: { IPColocationFactorWeight: 0, behaviourPenaltyWeight: 0 } }) // `watch` counts what chapter 03 does
    const host = await createLibp2p({ privateKey: await generateKeyPairFromSeed('Ed25519', seed), addresses: { listen },
      transports: [tcp()], connectionEncrypters: [noise()], services: { identify: identify(), pubsub },
      streamMuxers: [yamux({ keepAliveInterval: 10000, maxInboundStreams: 64 })],
      connectionManager: { maxConnections: 128, dialTimeout: 10000, inboundUpgradeTimeout: 5000,
        inboundConnectionThreshold: 1000, maxIncomingPendingConnections: 128 }, // many may share an address
      connectionGater: { denyDialMultiaddr: () => false, denyDialPeer: deny, denyInboundEncryptedConnection: deny } })
    await host.handle('/ipfs/ping/1.0.0', async (stream) => {
      for await (const part of stream) if (!stream.send(part)) await stream.onDrain(within(10))
      await stream.close(within(10))
    })
    host.addEventListener('connection:open', ({ detail: { remotePeer } }) => // two of a peer are enough (NET-8)
      host.getConnections(remotePeer).slice(0, -2).forEach((old) => old.abort(new Error('one too many'))))
    return Object.assign(new Peer(), { host, refused, pubsub: host.services.pubsub, blamed: new Map() })
  }
  keep(addresses) { // dials each peer of these, and again when it is lost (NET-8)
    const byPeer = {}
    for (const one of addresses.filter((one) => TCP.test(one))) (byPeer[one.split('/').at(-1)] ??= []).push(one)
    for (const same of Object.values(byPeer)) this.keepOne(same.map((one) => multiaddr(one)))
  }
  async keepOne(addresses) {
    for (let wait = 500; ; wait = Math.min(15000, 2 * wait)) {
      const begin = Date.now(), connection = await this.host.dial(addresses, within(10)).catch(() => undefined)
      if (connection?.status === 'open') await new Promise((lost) => connection.addEventListener('close', lost))
      if (connection && Date.now() - begin > 10000) wait = 500
      await sleep(wait * (0.7 + 0.6 * Math.random()))
    }
  }
  get addresses() { return this.host.getMultiaddrs().map(String) }
  get peers() { // ids, those that this host dialled first
    const came = (id) => this.host.getConnections(id).every(({ direction }) => direction === 'inbound')
    return this.host.getPeers().sort((a, b) => came(a) - came(b))
  }
  /** The reply of a peer to one request of a protocol. */
  async ask(id, { protocol, reply, seconds }, request) {
    const stream = await this.host.getConnections(id)[0].newStream(protocol, within(seconds))
    const answer = writeFrame(stream, pack(request)).then(() => readFrame(stream, reply.limit, seconds))
    return reply(await answer.finally(() => stream.abort(new Error('done'))))
  }
  /** `answer(request, open)` makes replies; `open` are under way. Bitmaps that cannot be end the connection (STR-4). */
  serve({ protocol, request, most }, answer) {
    let open = 0
    return this.host.handle(protocol, async (stream, { remotePeer }) => {
      open++
      try {
        await writeFrame(stream, pack(answer(request(await readFrame(stream, request.limit, 10)), open)))
      } catch (error) {
        stream.abort(error)
        if (error.code === 'size-mismatch') this.drop(remotePeer)
      } finally {
        open--
      }
    }, { maxInboundStreams: most })
  }
  async publish(topic, data) { // false where nobody listens
    return (await this.pubsub.publish(topic, data).catch(() => ({ recipients: [] }))).recipients.length > 0
  }
  /** `judge(data)` says accept, ignore or reject. */
  watch(topic, judge) {
    this.pubsub.topicValidators.set(topic, (from, { data }) => {
      const verdict = judge(data)
      if (verdict === 'reject') this.blame(from)
      return verdict
    })
    this.pubsub.subscribe(topic)
  }
  blame(id) { // a reject is forgiven after 10 s, one after the other; with 20 the peer is dropped
    const now = Date.now(), forgiven = Math.max(now, this.blamed.get(String(id)) ?? 0) + 10000
    this.blamed.set(String(id), forgiven)
    if (forgiven > now + 190000) this.drop(id)
  }
  drop(id) { // and refuses it for 300 s
    this.refused.set(String(id), Date.now() + 300000)
    this.host.hangUp(id).catch(() => undefined)
  }
}
