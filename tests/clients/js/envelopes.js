// Keys, plain zstd frames and signed envelopes (chapter 02).
import * as crypto from 'node:crypto'
import { compress, decompress, init } from '@bokuweb/zstd-wasm'
import { Refused, decode, must } from './msgpack.js'
import { bin, hash, is, isMap, key, map, nil, one, pack, signature, structure, text, uint, whole } from './shapes.js'

await init() // libzstd
export const MAX_MANIFEST = 16e6, MAX_CONTENT = 8e6, MAX_GOSSIP = 1e6
const WINDOW = 1 << 23, MAX_BLOCK = 1 << 17, MAX_BLOCKS = 65536, LIFE = 600000, SKEW = 30000
const KINDS = ['run', 'checkpoint', 'rollout', 'reference', 'receipts', 'hello']
export const hex = (bytes) => Buffer.from(bytes).toString('hex')
export const same = (a, b) => Buffer.compare(a, b) === 0
export const sha256 = (...parts) => parts.reduce((sum, part) => sum.update(part), crypto.createHash('sha256')).digest()
export const preimage = (signed) => Buffer.concat([Buffer.from('nous/envelope/1\0'), signed])
export const keyOf = (secret) => crypto.createPublicKey(secret).export({ format: 'der', type: 'spki' }).subarray(-32)

const P = 2n ** 255n - 19n, EIGHT = 0x05fc536d880238b13933c6d305acdfd5f098eff289f4c345b027b2c28f95e826n // y of order 8
/** IDN-2, which is what OpenSSL does, and IDN-3, which it does not. */
export function verify(key, message, sig) {
  must(key.length === 32 && sig.length === 64, 'bad-signature')
  const y = BigInt('0x' + hex(key.toReversed())) % 2n ** 255n // without the sign of x
  must(y > 1n && y < P - 1n && y !== EIGHT && y !== P - EIGHT, 'bad-signature')
  const jwk = { kty: 'OKP', crv: 'Ed25519', x: Buffer.from(key).toString('base64url') }
  must(crypto.verify(null, message, crypto.createPublicKey({ key: jwk, format: 'jwk' }), sig), 'bad-signature')
}

/** The content of one plain frame [ENV-8]. What it claims is looked at before libzstd reserves memory for it: it has to
 * be `size`, or what `check` takes [DLT-4]. Reading beyond the bytes throws, which is as bad as all else here. */
export function unzip(frame, size, check = (told) => must(told === size && size > 0, 'bad-compression')) {
  try {
    const data = Buffer.from(frame), flags = data[4], single = flags >> 5 & 1, width = [single, 2, 4, 8][flags >> 6]
    must(data.readUInt32LE() === 0xfd2fb528, 'bad-compression')
    let at = 6 - single + [0, 1, 2, 4][flags & 3] // behind the id of a dictionary, which libzstd wants to be 0
    const told = width === 8 ? Number(data.readBigUInt64LE(at)) : data.readUIntLE(at, width) + (width === 2 ? 256 : 0)
    const window = single ? told : 2 ** (10 + (data[5] >> 3)) * (1 + (data[5] & 7) / 8)
    must(window <= WINDOW, 'bad-compression')
    check(told)
    at += width
    for (let last = false, blocks = 0; !last;) {
      const head = data.readUIntLE(at, 3), size = head >> 3
      must(size <= Math.min(window, MAX_BLOCK) && ++blocks <= MAX_BLOCKS, 'bad-compression')
      at += (head & 6) === 2 ? 4 : 3 + size // a run of one byte, or what stands there
      last = head % 2 === 1
    }
    must(at + (flags & 4) === data.length, 'bad-compression')
    return decompress(data)
  } catch (error) {
    throw error instanceof Refused ? error : new Refused('bad-compression')
  }
}

const readEnvelope = structure(is((value) => isMap(value) && value.size === 2, map({ sig: signature, signed: bin() })),
  MAX_MANIFEST)
const headOf = map({ v: one(1), kind: text(), run: hash, from: key, seq: uint, ts: uint, exp: uint, body: bin(),
  'enc?': nil(text()), 'size?': nil(uint) })

/** What an envelope says, in the order of GOS-1. `now`: times are checked; `run`, `kind`, `keys`: of this run, this
 * kind, by one of these keys; `known(head, id)` may refuse what came before; `limit`: bytes of the envelope. */
export function openEnvelope(bytes, { now, run, kind, keys, known, limit } = {}) {
  const { sig, signed } = readEnvelope(bytes, limit), value = decode(signed), v = isMap(value) && value.get('v')
  must(!whole(v) || v === 1, 'unsupported-version')
  const head = headOf(value), id = sha256(signed), { ts, exp, enc = null, size = null, body } = head
  must(KINDS.includes(head.kind), 'unknown-kind')
  must(run === undefined || same(head.run, run), 'wrong-run')
  must(kind === undefined || head.kind === kind, 'wrong-kind')
  if (now !== undefined) {
    must(exp > ts && BigInt(exp) - BigInt(ts) <= LIFE, 'lifetime')
    must(ts <= now + SKEW, 'future-dated')
    must(exp > now, 'expired')
  }
  known?.(head, id)
  must(keys === undefined || keys.some((key) => same(key, head.from)), 'wrong-role')
  verify(head.from, preimage(signed), sig)
  must(enc === (size === null ? null : 'zstd'), 'bad-compression')
  must((size ?? body.length) <= (['run', 'checkpoint'].includes(head.kind) ? MAX_MANIFEST : MAX_CONTENT), 'oversize')
  return { id, signed, sig, head, content: size === null ? body : unzip(body, size) }
}

/** A signed envelope of `body`, compressed where that is smaller, and its id. */
export function seal({ kind, run, seq, now, body }, secret) {
  const zipped = compress(body), size = body.length
  const less = zipped.length < size && { enc: 'zstd', size, body: zipped }
  const signed = pack({ v: 1, kind, run, from: keyOf(secret), seq, ts: now, exp: now + LIFE, body, ...less })
  return { id: sha256(signed), envelope: pack({ sig: crypto.sign(null, preimage(signed), secret), signed }) }
}
