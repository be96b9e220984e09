// What a volunteer never does, but vectors ask for: frames that lie there as a whole, entries of files that it would
// publish, proofs of equivocation of others, keys of seeds and peer ids. Only the adapter asks for it.
import { createPrivateKey } from 'node:crypto'
import { hex, same, sha256 } from './envelopes.js'
import { must } from './msgpack.js'
import { bin, int, list, map, pack, structure, text } from './shapes.js'
import { BLOB, HAVE, HEAD, address, checkFiles, fileEntry, openCheckpoint } from './structures.js'

const haveReply = structure(map({ 'have?': bin(0, 65536), 'http?': int(1, 65535), 'error?': text(0, 64),
  'peers?': list(address, 0, 16) }), 73728)
const MESSAGES = { 'head-request': HEAD.request, 'head-reply': HEAD.reply, 'blob-request': BLOB.request,
  'blob-reply': BLOB.reply, 'have-request': HAVE.request, 'have-reply': haveReply }

/** STR-1: bytes behind their length, and the structure that stands there. */
export function frame(payload) {
  const length = Buffer.alloc(4)
  length.writeUInt32BE(payload.length)
  return Buffer.concat([length, payload])
}
export function unframe(message, bytes) {
  must(bytes.length >= 4, 'malformed')
  const length = Buffer.from(bytes).readUInt32BE(), read = MESSAGES[message]
  must(length <= read.limit, 'oversize')
  must(length <= bytes.length - 4, 'malformed')
  return read(bytes.subarray(4, 4 + length))
}

export const readEntry = structure((value) => {
  const entry = fileEntry(value)
  checkFiles([entry])
  return entry
}, 16e6)
/** The entry of a file with this content. */
export function entryOf(path, data, chunk) {
  const hashOf = (_, i) => sha256(data.subarray(i * chunk, (i + 1) * chunk)), length = Math.ceil(data.length / chunk)
  return pack({ path, size: data.length, chunk, chunks: Buffer.concat(Array.from({ length }, hashOf)) })
}
export const weightsHash = (tensors) => sha256('nous/weights/1\0', pack(tensors))

const readProof = structure(map({ first: bin(), second: bin() }), 32001024)
/** CKP-17: whose key signed two checkpoints of one version. */
export function openEquivocation(proof, run, manifest) {
  const { first, second } = readProof(proof)
  const [a, b] = [first, second].map((envelope) => openCheckpoint(envelope, run, manifest))
  must(same(a.head.from, b.head.from) && a.manifest.version === b.manifest.version && !same(a.hash, b.hash))
  return { key: a.head.from, version: a.manifest.version }
}

/** The private key of 32 bytes. */
export const secretOf = (seed) => createPrivateKey({ format: 'der', type: 'pkcs8',
  key: Buffer.concat([Buffer.from('302e020100300506032b657004220420', 'hex'), seed]) })
const DIGITS = '123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz'
const base58 = (n) => n > 0n ? base58(n / 58n) + DIGITS[n % 58n] : '1' // of bytes of which the first is 0
/** IDN-1: base58btc of the identity multihash of the key. */
export const peerIdOf = (key) => base58(BigInt('0x002408011220' + hex(key)))
