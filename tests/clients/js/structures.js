// The structures of chapters 02, 03, 05, 07, 09 and 10: read with all their checks, and written; envelopes and invites.
// What is read has no prototype and only keys that its schema names; maps with keys of strangers are `Map`s.
import * as crypto from 'node:crypto'
import { compress, decompress, init } from '@bokuweb/zstd-wasm'
import { Real, Refused, decode, encode, must } from './msgpack.js'

await init() // libzstd
const MAX_MANIFEST = 16e6, MAX_BODY = 8e6, MAX_PAIR = 32001024, MAX_GROUP = 1 << 26, DISK = 2 ** 42, WINDOW = 1 << 23
const MAX_INT = 2n ** 63n - 1n, TOKENS = 1 << 20, MAGNITUDE = 1e6, LIFE = 600000, SKEW = 30000, BIG = 262144
export const MAX_ENVELOPE = 1e6 // where it is gossiped
export const sha256 = (...parts) => parts.reduce((sum, part) => sum.update(part), crypto.createHash('sha256')).digest()
export const hex = (bytes) => Buffer.from(bytes).toString('hex')
/** A text of strangers as a person may see it (CNV-1). */
export const printable = (text) => text.replace(/[\p{Cc}\u2028\u2029\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/gu,
  (one) => `\\u${one.charCodeAt().toString(16).padStart(4, '0')}`)
export const same = (a, b) => Buffer.compare(a, b) === 0

// A type is a function from a decoded value to what a reader gets; it refuses all others with `wrong-type`.
const itself = (value) => value, is = (test, as = itself) => (value) => (must(test(value)), as(value))
const within = (test, size, least, most, as) => is((v) => test(v) && size(v) >= least && size(v) <= most, as)
const length = (value) => value.length, isMap = (value) => value instanceof Map
const whole = (value) => typeof value === 'number' || typeof value === 'bigint'
const int = (least, most = MAX_INT) => within(whole, itself, least, most)
const bin = (least = 0, most = Infinity) => within((value) => value instanceof Uint8Array, length, least, most)
const text = (least = 0, most = Infinity, form = /^/) => // characters are code points
  within((value) => typeof value === 'string' && form.test(value), (value) => [...value].length, least, most)
const number = (value) => value instanceof Real ? value.value : whole(value) ? Number(value) : NaN
const isReal = (value) => !isNaN(number(value))
const real = (least = -Infinity, most = Infinity) => within(isReal, number, least, most, number)
const one = (...values) => is((value) => values.includes(value))
const nil = (of) => (value) => value === null ? null : of(value)
const list = (of, least = 0, most = Infinity) => within(Array.isArray, length, least, most, (v) => v.map((x) => of(x)))
const dict = (of, least = 0, most = Infinity) =>
  within(isMap, (value) => value.size, least, most, (v) => new Map([...v].map(([key, item]) => [key, of(item)])))
const record = (shape, get, check = itself) => (value) => {
  const result = Object.create(null)
  Object.entries(shape).forEach(([key, of], index) => {
    const name = key.replace('?', ''), item = get(value, name, index) // a key that ends in ? may be absent
    if (item !== undefined || name === key) result[name] = of(item)
  })
  return check(result), result
}
const row = (shape) => is(Array.isArray, record(shape, (value, name, index) => value[index])) // may be longer [ENC-10]
const map = (shape, check) => is(isMap, record(shape, (value, name) => value.get(name), check))

const hash = bin(32, 32), key = hash, signature = bin(64, 64), uint = int(0), name = text(0, 256), named = text(1, 256)
const above = real(Number.MIN_VALUE), share = real(0, 1), bool = one(true, false), counter = int(0, 2 ** 32 - 1)
const short = text(0, 64), code = text(0, 64, /^[a-z0-9-]*$/), port = int(1, 65535), have = bin(0, 65536)
const chunk = int(1 << 14, 1 << 22), figure = nil(real()), some = (most) => list(address, 0, most)
const dtype = one('float32', 'bfloat16', 'float16'), bound = map({ mean: above, deviation: above, limit: above })
const engine = map({ name, version: name, dtype: name, device: name }), amount = int(1, MAX_GROUP)
const scalar = is((value) => ['boolean', 'string'].includes(typeof value) || isReal(value))
const address = text(1, 256, /^\/[!-~]*\/p2p\/[1-9A-HJ-NP-Za-km-z]+$/), mirror = text(1, 1024, /^https?:\/\/[!-~]+$/)
const file = { path: text(), size: int(0, DISK), chunk, chunks: bin() }
const delta = row({ segment: uint, encoding: one('gap', 'xor', 'full'), size: int(1, 1 << 24) })
const segment = row({ length: int(1, TOKENS), role: int(0, 4), trained: bool }), ends = one('stop', 'length', 'cut')
const trajectory = map({ tokens: bin(), segments: list(segment, 1), logprobs: bin(), reward: real(), finish: ends,
  'agent?': name, 'components?': dict(real(), 0, 64), 'advantages?': bin(), 'advantage?': real(),
  'parents?': list(is(whole)) })
const environment = map({ id: named, version: named, weight: int(1, 1e6), 'advantages?': bool,
  'config?': dict((value) => (Array.isArray(value) ? list(scalar) : scalar)(value)) })
const SCHEMAS = { // type, largest number of bytes, of values where that is not 65,536
  envelope: [is((value) => isMap(value) && value.size === 2, map({ sig: signature, signed: bin() })), MAX_MANIFEST],
  signed: [map({ v: one(1), kind: text(), run: hash, from: key, seq: uint, ts: uint, exp: uint, body: bin(),
    'enc?': nil(text()), 'size?': nil(uint) }), MAX_MANIFEST],
  'head-request': [map({ run: hash }), 1024],
  'head-reply': [map({ 'run?': bin(), 'checkpoint?': bin(), 'error?': short }), MAX_PAIR],
  'blob-request': [map({ hash }), 1024],
  'blob-reply': [map({ 'data?': bin(), 'error?': short }), 4195328],
  'have-request': [map({ run: hash, checkpoint: hash, 'have?': have, 'http?': port, 'addresses?': some(8) }), 69632],
  'have-reply': [map({ 'have?': have, 'http?': port, 'peers?': some(16), 'error?': short }), 73728],
  'run-manifest': [is(isSpoken, map({ name: named, created: uint, protocol: list(uint, 2, 2), root: key, base: hash,
    trainers: list(key, 1, 64), environments: list(environment, 1, 1024), group: int(2, 1024), staleness: int(0, 8),
    model: map({ family: named, parameters: uint, bytes: uint, vocabulary: int(1), context: int(1, TOKENS), dtype }),
    sampling: map({ mode: one('seeded', 'free'), temperature: above, max_tokens: int(1, TOKENS),
      stop: list(uint, 1, 64), logprobs: one('f32', 'f16') }), shards: int(1, 65536), 'chat?': name,
    thresholds: map({ logprobs: bound, distances: bound, distance_max: above, tokens: int(1), drift_slack: above,
      drift_limit: above, stop_probability: share, reward: real(0), verifier: dtype, calibrated: named, 'groups?': uint,
      'false_refusals?': share, 'model?': hash }),
    limits: map({ groups_per_second: above, inline_bytes: int(1024) }) }, checkRun)), MAX_MANIFEST, BIG],
  invite: [map({ addresses: list(address, 1, 16), run: hash }), 2048],
  'rollout-group': [map({ checkpoint: hash, counter, env: text(1), engine, trajectories: list(trajectory, 1, 1024) }),
    MAX_GROUP],
  reference: [map({ checkpoint: hash, counter, hash, size: amount, packed: amount, chunk, chunks: bin() }), 135168],
  'checkpoint-manifest': [is(isOfKind, map({ version: uint, kind: text(), files: list(map(file), 1, 4096),
    tensors: dict(hash, 1), beacon: hash, 'parent?': hash, 'levels?': dict(uint), 'stats?': dict(real()),
    'eval?': dict(real()), 'deltas?': list(map(file)), 'chain?': list(hash, 0, 64), 'mirrors?': list(mirror, 0, 16) },
  checkManifest)), MAX_MANIFEST, BIG],
  'file-entry': [map(file, (entry) => checkFiles([entry])), MAX_MANIFEST],
  equivocation: [map({ first: bin(), second: bin() }), MAX_PAIR],
  'delta-header': [map({ tensors: dict(list(delta)) }), MAX_MANIFEST, BIG],
  receipts: [map({ items: list(row({ rollout: hash, peer: key, verdict: one('accepted', 'refused'), code,
    measured: figure, threshold: figure, credit: uint }), 0, 4096),
  'standings?': list(row({ peer: key, state: one('probation', 'active', 'throttled', 'quarantine', 'banned'),
    accepted: uint, refused: uint, credit: uint, debit: uint, rank: uint, of: uint, until: uint }), 0, 4096),
  'known?': list(row({ peer: key, version: int(-1) }), 0, 4096) }), MAX_BODY],
  hello: [map({ agent: short, engine }), 4096],
}
/** The structure that `bytes` hold, if it breaks no rule that needs no other knowledge. */
export function read(structure, bytes, limit) {
  const [of, most, values] = SCHEMAS[structure]
  return of(decode(bytes, limit ?? most, values))
}
/** The bytes of a structure: rows are arrays here. A writer keeps the rules of a reader. */
export function write(structure, value) {
  const bytes = encode(plain(value))
  return read(structure, bytes) && bytes
}
function plain(value) {
  if (typeof value === 'number') return Number.isSafeInteger(value) ? value : new Real(value)
  if (Array.isArray(value)) return value.map(plain)
  if (value === null || typeof value !== 'object' || value instanceof Uint8Array || value instanceof Real) return value
  const entries = isMap(value) ? [...value] : Object.entries(value).filter(([, item]) => item !== undefined)
  return new Map(entries.map(([key, item]) => [key, plain(item)]))
}

function isSpoken(value) { // RUN-3, before the shape of all else
  const protocol = isMap(value) && value.get('protocol'), known = Array.isArray(protocol) && protocol.length === 2
  if (known && protocol.every(whole)) must(protocol[0] <= 1 && protocol[1] >= 1, 'unsupported-version')
  return true
}
function isOfKind(value) { // CKP-6, before the shape of all else
  const kind = isMap(value) && value.get('kind')
  must(typeof kind !== 'string' || ['full', 'delta'].includes(kind), 'unknown-kind')
  return true
}
function checkRun({ environments, sampling, model }) { // RUN-4
  must(new Set(environments.map(({ id }) => id)).size === environments.length, 'out-of-range')
  must(sampling.stop.every((token) => token < model.vocabulary) && sampling.max_tokens <= model.context, 'out-of-range')
}
const PART = /^[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_-])?$/, ENDS = /\.(safetensors|json|jinja|txt)$/
function checkFiles(files) { // CKP-3 to CKP-5
  const lowered = new Set(files.map(({ path }) => path.toLowerCase()))
  let total = 0
  files.forEach(({ path, size, chunk, chunks }, index) => {
    const parts = path.split('/'), folders = parts.map((_, i) => parts.slice(0, i).join('/').toLowerCase())
    must(path.length <= 255 && parts.every((part) => PART.test(part)) && ENDS.test(path), 'path')
    must(!folders.some((folder) => lowered.has(folder)) && (index === 0 || files[index - 1].path < path), 'path')
    must(chunks.length === 32 * Math.ceil(size / chunk) && (total += size) <= DISK, 'size-mismatch')
  })
  must(lowered.size === files.length, 'path')
}
function checkManifest({ version, kind, files, parent, deltas = [], chain = [] }) {
  must((parent !== undefined) === version > 0) // CKP-8
  checkFiles(files)
  if (kind === 'full') return must(deltas.length + chain.length === 0) // CKP-13, to the end
  must(chain.length >= 1 && chain.length <= version && same(chain.at(-1), parent))
  must(new Set(chain.map(hex)).size === chain.length)
  const weights = new Set(files.map(({ path }) => path).filter((path) => path.endsWith('.safetensors')))
  must(deltas.every(({ path }) => weights.has(path)), 'path')
  checkFiles(deltas)
}

/** The private key of 32 bytes, and the public key of a private one. */
export const secretOf = (seed) => crypto.createPrivateKey({ format: 'der', type: 'pkcs8',
  key: Buffer.concat([Buffer.from('302e020100300506032b657004220420', 'hex'), seed]) })
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
const DIGITS = '123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz'
const base58 = (n) => n > 0n ? base58(n / 58n) + DIGITS[n % 58n] : '1' // of bytes of which the first is 0
/** IDN-1: base58btc of the identity multihash of the key. */
export const peerIdOf = (key) => base58(BigInt('0x002408011220' + hex(key)))

/** The content of one zstd frame [ENV-8]. What it claims is looked at before libzstd reserves memory for it: it has to
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
    at += width // now through the blocks
    for (let head = 0; !(head & 1); at += (head & 6) === 2 ? 4 : 3 + (head >> 3)) head = data.readUIntLE(at, 3)
    must(at + (flags & 4) === data.length, 'bad-compression')
    return decompress(data)
  } catch (error) { throw error instanceof Refused ? error : new Refused('bad-compression') }
}

const preimage = (signed) => Buffer.concat([Buffer.from('nous/envelope/1\0'), signed])
/** What an envelope says, in the order of GOS-1. `now`: times are checked; `run`, `kind`, `keys`: of this run, this
 * kind, by one of these keys; `known(head, id)` may refuse what came before; `limit`: bytes of the envelope. */
export function openEnvelope(bytes, { now, run, kind, keys, known = itself, limit } = {}) {
  const { sig, signed } = read('envelope', bytes, limit), value = decode(signed), v = isMap(value) && value.get('v')
  must(!whole(v) || v === 1, 'unsupported-version')
  const head = SCHEMAS.signed[0](value), id = sha256(signed), { ts, exp, enc = null, size = null, body } = head
  must(['run', 'checkpoint', 'rollout', 'reference', 'receipts', 'hello'].includes(head.kind), 'unknown-kind')
  must(run === undefined || same(head.run, run), 'wrong-run')
  must(kind === undefined || head.kind === kind, 'wrong-kind')
  if (now !== undefined) {
    must(exp > ts && BigInt(exp) - BigInt(ts) <= LIFE, 'lifetime')
    must(ts <= now + SKEW, 'future-dated')
    must(exp > now, 'expired')
  }
  known(head, id)
  must(keys === undefined || keys.some((key) => same(key, head.from)), 'wrong-role')
  verify(head.from, preimage(signed), sig)
  must(enc === (size === null ? null : 'zstd'), 'bad-compression')
  must((size ?? body.length) <= (['run', 'checkpoint'].includes(head.kind) ? MAX_MANIFEST : MAX_BODY), 'oversize')
  return { id, signed, sig, head, value, content: size === null ? body : unzip(body, size) }
}
/** A signed envelope of `body`, compressed where that is smaller. */
export function seal({ kind, run, seq, now, body }, secret) {
  const zipped = compress(body), size = body.length
  const less = zipped.length < size && { enc: 'zstd', size, body: zipped }
  const signed = write('signed', { v: 1, kind, run, from: keyOf(secret), seq, ts: now, exp: now + LIFE, body, ...less })
  return write('envelope', { sig: crypto.sign(null, preimage(signed), secret), signed })
}
function open(kind, structure, envelope, options) {
  const opened = openEnvelope(envelope, { kind, ...options })
  return { ...opened, hash: sha256(opened.content), manifest: read(structure, opened.content) }
}
/** RUN-1 to RUN-5. */
export function openRun(envelope, run) {
  const opened = open('run', 'run-manifest', envelope, { run })
  must(same(opened.hash, run), 'wrong-run')
  must(same(opened.manifest.root, opened.head.from), 'wrong-role')
  return { ...opened, run }
}
/** RCP-1, RCP-2. `options` are those of `openEnvelope`: `now`, `known` and `limit` where it was gossiped. */
export function openReceipts(envelope, run, { trainers }, options) {
  const { manifest, ...opened } = open('receipts', 'receipts', envelope, { run, keys: trainers, ...options })
  return { ...opened, ...manifest }
}
export const filesHash = (files) => sha256('nous/files/1\0', encode(plain(files)))
export const weightsHash = (tensors) => sha256('nous/weights/1\0', encode(tensors))
/** CKP-1 to CKP-16. */
export function openCheckpoint(envelope, run, { trainers, base }, options) {
  const opened = open('checkpoint', 'checkpoint-manifest', envelope, { run, keys: trainers, ...options })
  must(opened.manifest.version > 0 || same(filesHash(opened.manifest.files), base), 'hash-mismatch')
  return opened
}
/** CKP-17: whose key signed two checkpoints of one version. */
export function openEquivocation(proof, run, manifest) {
  const { first, second } = read('equivocation', proof)
  const [a, b] = [first, second].map((envelope) => openCheckpoint(envelope, run, manifest))
  must(same(a.head.from, b.head.from) && a.manifest.version === b.manifest.version && !same(a.hash, b.hash))
  return { key: a.head.from, version: a.manifest.version }
}

// ROL-10: numbers in byte planes. A half is a single whose exponent is 112 less, without the lower 13 bits.
const FORMS = { u32: Uint32Array, f32: Float32Array, f16: Uint16Array }, bits = new Uint32Array(1)
const single = new Float32Array(bits.buffer)
function toHalf(value) { // the nearest, ties to even
  single[0] = value * 2 ** -112
  const size = (bits[0] & 0x7fffffff) + 0xfff + (bits[0] >> 13 & 1) >> 13
  return bits[0] >> 16 & 0x8000 | Math.min(size, Number.isNaN(value) ? 0x7e00 : 0x7c00)
}
function fromHalf(half) {
  bits[0] = (half & 0x8000) << 16 | (half & 0x7fff) << 13
  if (Math.abs(single[0]) < 2 ** -96) return single[0] * 2 ** 112
  bits[0] |= 0x7f800000 // infinity or no number
  return single[0]
}
export function planes(values, form) {
  const flat = FORMS[form].from(values, form === 'f16' ? toHalf : undefined), raw = new Uint8Array(flat.buffer)
  return raw.map((_, i) => raw[i % flat.length * flat.BYTES_PER_ELEMENT + Math.floor(i / flat.length)])
}
export function unplanes(bytes, form) {
  const width = FORMS[form].BYTES_PER_ELEMENT, count = bytes.length / width
  must(Number.isInteger(count))
  const raw = Uint8Array.from(bytes, (_, i) => bytes[i % width * count + Math.floor(i / width)])
  return form === 'f16' ? Float32Array.from(new Uint16Array(raw.buffer), fromHalf) : new FORMS[form](raw.buffer)
}

/** A group in the form of ROL-1 to ROL-13. */
export function readGroup(body, manifest) {
  const group = read('rollout-group', body), place = manifest.environments.find(({ id }) => id === group.env)
  must(group.trajectories.length >= manifest.group, 'group-size')
  must(place !== undefined, 'wrong-environment')
  for (const trajectory of group.trajectories) checkTrajectory(trajectory, manifest, place.advantages)
  return group
}
function checkTrajectory({ segments, parents, reward, finish, advantage, ...arrays }, { sampling, model }, allowed) {
  const tokens = unplanes(arrays.tokens, 'u32'), stops = new Set(sampling.stop)
  let at = 0
  const spans = segments.map(({ length }) => tokens.subarray(at, at += length))
  const trained = segments.reduce((sum, segment) => sum + (segment.trained ? segment.length : 0), 0)
  must(tokens.length > 0 && at === tokens.length && !segments[0].trained, 'segments')
  must(tokens.length <= model.context && trained <= sampling.max_tokens, 'too-long')
  must(tokens.every((token) => token < model.vocabulary), 'token-range')
  must(arrays.logprobs.length === trained * FORMS[sampling.logprobs].BYTES_PER_ELEMENT, 'logprobs')
  const logprobs = unplanes(arrays.logprobs, sampling.logprobs)
  must(logprobs.every(Number.isFinite), 'not-finite')
  must(logprobs.every((value) => value <= 0), 'logprobs')
  const many = arrays.advantages && unplanes(arrays.advantages, 'f32'), given = [...many ?? [], advantage ?? 0]
  must(!many || advantage === undefined && many.length === trained, 'advantages')
  must(allowed || !many && advantage === undefined, 'advantages')
  must(given.every(Number.isFinite), 'not-finite')
  must([reward, ...given].every((value) => Math.abs(value) <= MAGNITUDE), 'out-of-range')
  const early = (span, i) => segments[i].trained && span.subarray(0, -1).some((token) => stops.has(token))
  const full = trained === sampling.max_tokens || tokens.length === model.context
  const end = segments.at(-1).trained && stops.has(tokens.at(-1)) ? 'stop' : full ? 'length' : 'cut'
  must(!spans.some(early) && finish === end && (end !== 'cut' || trained > 0), 'finish')
  const fits = (parent, i) => parent < i && parent >= (segments[i].trained ? 0 : -1)
  must(parents === undefined || parents.length === segments.length && parents.every(fits), 'segments')
}
/** ROL-14, ROL-15. */
export function readReference(body, { group, model }) {
  const reference = read('reference', body), { size, packed, chunk, chunks } = reference
  must(Math.max(size, packed) <= 65536 + 16 * group * (32 * model.context + 4096), 'oversize')
  must(chunks.length === 32 * Math.ceil(packed / chunk), 'size-mismatch')
  return reference
}
/** ROL-17: the group of a reference, from its whole frame. */
export function openReferenced({ checkpoint, counter, hash, size, packed, chunk, chunks }, frame) {
  must(frame.length === packed, 'size-mismatch')
  for (let at = 0, i = 0; at < packed; at += chunk, i += 32)
    must(same(sha256(frame.subarray(at, at + chunk)), chunks.subarray(i, i + 32)), 'hash-mismatch')
  const content = unzip(frame, size)
  must(same(sha256(content), hash), 'hash-mismatch')
  const group = read('rollout-group', content)
  must(same(group.checkpoint, checkpoint) && group.counter === counter, 'hash-mismatch')
  return { content, group }
}

/** STR-1: a structure behind its length, and the one that stands there. */
export function frame(structure, value) {
  const payload = write(structure, value)
  return Buffer.concat([new Uint8Array(new Uint32Array([payload.length]).buffer).reverse(), payload])
}
export function unframe(structure, bytes) {
  must(bytes.length >= 4, 'malformed')
  const length = Buffer.from(bytes).readUInt32BE()
  must(length <= SCHEMAS[structure][1], 'oversize')
  must(length <= bytes.length - 4, 'malformed')
  return read(structure, bytes.subarray(4, 4 + length))
}
/** STR-3: the chunk in a reply. */
export function openBlob(hash, reply) {
  const { data, error } = unframe('blob-reply', reply)
  must(data !== undefined, error === 'busy' ? 'busy' : 'not-found')
  must(same(sha256(data), hash), 'hash-mismatch')
  return data
}
/** STR-4: the numbers of the chunks that a bitmap names, and back. */
export function readBitmap(have, chunks) {
  const held = Array.from({ length: 8 * have.length }, (_, i) => i).filter((i) => have[i >> 3] >> i % 8 & 1)
  must(have.length === Math.ceil(chunks / 8) && held.every((i) => i < chunks), 'size-mismatch')
  return held
}
export function writeBitmap(held, chunks) {
  const have = new Uint8Array(Math.ceil(chunks / 8))
  for (const i of held) have[i >> 3] |= 1 << i % 8
  return have
}
/** INV-1 to INV-4. */
export function readInvite(text) {
  try {
    const [, sign] = /^nous1([A-Za-z0-9_-]{0,2043})$/.exec(text.replace(/\p{White_Space}/gu, ''))
    const bytes = Buffer.from(sign, 'base64url'), payload = bytes.subarray(0, -4)
    must(bytes.toString('base64url') === sign && same(sha256(payload).subarray(0, 4), bytes.subarray(-4)))
    return read('invite', payload)
  } catch { throw new Refused('invite') }
}
export const shardOf = (key, shards) => Number(Buffer.from(key).readBigUInt64LE() % BigInt(shards))
export const topics = (run) => ({ rollouts: (shard) => `/nous/1/${hex(run)}/rollouts/${shard}`,
  checkpoints: `/nous/1/${hex(run)}/checkpoints`, receipts: `/nous/1/${hex(run)}/receipts` })
