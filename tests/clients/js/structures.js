// The structures of chapters 02, 03, 05, 07, 09 and 10: reading with all checks, writing, envelopes, invites.
// What is read has no prototype and only keys that a schema names; maps with keys of strangers stay `Map`s.
import * as crypto from 'node:crypto'
import { Zstd } from '@hpcc-js/wasm-zstd'
import { Real, Refused, decode, encode, must } from './msgpack.js'

const zstd = await Zstd.load()
export const MAX_BODY = 8e6, MAX_MANIFEST = 16e6, MAX_ENVELOPE = 1e6, MAX_FETCHED = 1 << 24, MAX_REFERENCED = 1 << 26
const TOKENS = 1 << 20, MAGNITUDE = 1e6, CHECKPOINT = 2 ** 42, WINDOW = 1 << 23, LIFE = 600000, SKEW = 30000
const text8 = (domain) => Buffer.from(domain + '\0')
export const sha256 = (...parts) => parts.reduce((hash, part) => hash.update(part), crypto.createHash('sha256')).digest()
export const hex = (bytes) => Buffer.from(bytes).toString('hex')
export const same = (a, b) => Buffer.compare(a, b) === 0

// --- types: `read` takes a decoded value, `write` gives one back -----------------------------------

const type = (test, read = (value) => value, write = (value) => value) => (
  { read(value) { must(test(value)); return read(value) }, write })
const whole = (value) => typeof value === 'number' || typeof value === 'bigint'
const int = (least, most) => type((value) => whole(value) && value >= least && value <= most)
const bin = (least = 0, most = Infinity) => (
  type((value) => value instanceof Uint8Array && value.length >= least && value.length <= most))
const text = (least = 0, most = Infinity, form = /^/) => type((value) => typeof value === 'string' && form.test(value) &&
  (most === Infinity || [...value].length <= most) && value.length >= least)
const one = (...values) => type((value) => values.includes(value))
const number = (value) => value instanceof Real ? value.value : Number(value)
const real = (test = () => true) => (
  type((value) => (whole(value) || value instanceof Real) && test(number(value)), number, (value) => new Real(value)))
const or = (of, ...values) => ({
  read: (value) => values.includes(value) ? value : of.read(value),
  write: (value) => values.includes(value) ? value : of.write(value) })
const list = (of, least = 0, most = Infinity) => type(
  (value) => Array.isArray(value) && value.length >= least && value.length <= most,
  (value) => value.map(of.read), (value) => value.map(of.write))
const dict = (of, least = 0, most = Infinity) => {
  const each = (how) => (value) => new Map([...value].map(([key, item]) => [key, how(item)]))
  return type((value) => value instanceof Map && value.size >= least && value.size <= most, each(of.read), each(of.write))
}
function fields(shape, get, put) { // keys that end in ? may be absent
  const entries = Object.entries(shape).map(([key, of]) => [key.replace('?', ''), of, key.endsWith('?')])
  return {
    read(value) {
      const result = Object.create(null)
      entries.forEach(([key, of, optional], index) => {
        const item = get(value, key, index)
        if (item === undefined) must(optional)
        else result[key] = of.read(item)
      })
      return result
    },
    write: (value) => put(entries.filter(([key]) => value[key] !== undefined).map(([key, of]) => [key, of.write(value[key])])),
  }
}
function map(shape, check = () => {}, closed = false) {
  const of = fields(shape, (value, key) => value.get(key), (pairs) => new Map(pairs))
  return type((value) => value instanceof Map && (!closed || value.size === Object.keys(shape).length), (value) => {
    const result = of.read(value)
    check(result)
    return result
  }, of.write)
}
const tuple = (shape) => {
  const of = fields(shape, (value, key, index) => value[index], (pairs) => pairs.map(([, item]) => item))
  return type(Array.isArray, of.read, of.write)
}

// --- structures ------------------------------------------------------------------------------------

const hash = bin(32, 32), key = hash, signature = bin(64, 64), uint = int(0, 2n ** 63n - 1n), name = text(0, 256)
const named = text(1, 256), above = real((x) => x > 0), atLeast = real((x) => x >= 0), share = real((x) => x >= 0 && x <= 1)
const dtype = one('float32', 'bfloat16', 'float16'), counter = int(0, 2 ** 32 - 1), figure = or(real(), null)
const short = text(0, 64), port = int(1, 65535), have = bin(0, 65536), chunk = int(1 << 14, 1 << 22)
const ADDRESS = /^\/[!-~]*\/p2p\/[1-9A-HJ-NP-Za-km-z]+$/
const address = text(1, 256, ADDRESS), mirror = text(1, 1024, /^https?:\/\/[!-~]+$/)
const bound = map({ mean: above, deviation: above, limit: above })
const scalar = type((value) => typeof value === 'boolean' || typeof value === 'string' || whole(value) || value instanceof Real)
const engine = map({ name, version: name, dtype: name, device: name })
const fileEntry = map({ path: text(), size: int(0, CHECKPOINT), chunk, chunks: bin() })

export const KINDS = ['run', 'checkpoint', 'rollout', 'reference', 'receipts', 'hello']
const SCHEMAS = {
  envelope: map({ sig: signature, signed: bin() }, undefined, true),
  signed: map({ v: one(1), kind: text(), run: hash, from: key, seq: uint, ts: uint, exp: uint, body: bin(),
    'enc?': or(text(), null), 'size?': or(uint, null) }),
  'head-request': map({ run: hash }),
  'head-reply': map({ 'run?': bin(), 'checkpoint?': bin(), 'error?': short }),
  'blob-request': map({ hash }),
  'blob-reply': map({ 'data?': bin(), 'error?': short }),
  'have-request': map({ run: hash, checkpoint: hash, 'have?': have, 'http?': port, 'addresses?': list(address, 0, 8) }),
  'have-reply': map({ 'have?': have, 'http?': port, 'peers?': list(address, 0, 16), 'error?': short }),
  'run-manifest': map({
    name: named, created: uint, protocol: tuple({ 0: uint, 1: uint }), root: key, trainers: list(key, 1, 64), base: hash,
    model: map({ family: named, parameters: uint, bytes: uint, vocabulary: uint, context: int(1, TOKENS), dtype }),
    environments: list(map({ id: named, version: named, weight: int(1, 1e6),
      'config?': dict({ read: (value) => (Array.isArray(value) ? list(scalar) : scalar).read(value) }),
      'advantages?': one(true, false) }), 1, 1024),
    sampling: map({ mode: one('seeded', 'free'), temperature: above, max_tokens: int(1, TOKENS), stop: list(uint, 1, 64),
      logprobs: one('f32', 'f16') }),
    group: int(2, 1024), staleness: int(0, 8), shards: int(1, 65536),
    thresholds: map({ logprobs: bound, distances: bound, distance_max: above, tokens: int(1, 2n ** 63n - 1n),
      drift_slack: above, drift_limit: above, stop_probability: share, reward: atLeast, verifier: dtype, calibrated: named,
      'groups?': uint, 'false_refusals?': share, 'model?': hash }),
    limits: map({ groups_per_second: above, inline_bytes: int(1024, 2n ** 63n - 1n) }), 'chat?': name }, checkRun),
  invite: map({ addresses: list(address, 1, 16), run: hash }),
  'rollout-group': map({ checkpoint: hash, counter, env: text(1), engine, trajectories: list(map({
    tokens: bin(), segments: list(tuple({ length: int(1, TOKENS), role: int(0, 4), trained: one(true, false) }), 1),
    logprobs: bin(), reward: real(), finish: one('stop', 'length', 'cut'), 'components?': dict(real(), 0, 64),
    'agent?': name, 'advantages?': bin(), 'advantage?': real(), 'parents?': list(type(whole)) }), 1, 1024) }),
  reference: map({ checkpoint: hash, counter, hash, size: int(1, MAX_REFERENCED), packed: int(1, MAX_REFERENCED), chunk,
    chunks: bin() }),
  'checkpoint-manifest': map({ version: uint, kind: text(), files: list(fileEntry, 1, 4096), tensors: dict(hash, 1),
    beacon: hash, 'parent?': hash, 'levels?': dict(uint), 'stats?': dict(real()), 'eval?': dict(real()),
    'deltas?': list(fileEntry), 'chain?': list(hash, 0, 64), 'mirrors?': list(mirror, 0, 16) }, checkManifest),
  'file-entry': fileEntry,
  equivocation: map({ first: bin(), second: bin() }),
  'delta-header': map({ tensors: dict(list(tuple({ segment: uint, encoding: one('gap', 'xor', 'full'), size: int(1, 1 << 24) }))) }),
  receipts: map({
    items: list(tuple({ rollout: hash, peer: key, verdict: one('accepted', 'refused'), code: text(0, 64, /^[a-z0-9-]*$/),
      measured: figure, threshold: figure, credit: uint }), 0, 4096),
    'standings?': list(tuple({ peer: key, state: one('probation', 'active', 'throttled', 'quarantine', 'banned'),
      accepted: uint, refused: uint, credit: uint, debit: uint, rank: uint, of: uint, until: uint }), 0, 4096),
    'known?': list(tuple({ peer: key, version: int(-1, 2n ** 63n - 1n) }), 0, 4096) }),
  hello: map({ agent: short, engine }),
  proof: map({ sig: signature, signed: bin() }, undefined, true),
  'proof-signed': map({ v: one(1), key, made: uint, run: bin(), standing: or(bin(), null), receipts: list(bin(), 0, 512) },
    undefined, true),
}
const LIMITS = { 'head-request': 1024, 'head-reply': 32001024, 'blob-request': 1024, 'blob-reply': 4195328, hello: 4096,
  'have-request': 69632, 'have-reply': 73728, 'run-manifest': MAX_MANIFEST, 'checkpoint-manifest': MAX_MANIFEST,
  receipts: MAX_BODY, 'rollout-group': MAX_REFERENCED, reference: 135168, equivocation: 32001024, proof: 1 << 27,
  'proof-signed': 1 << 27, 'delta-header': MAX_MANIFEST }
const BIG = ['run-manifest', 'checkpoint-manifest', 'delta-header'] // ENC-11

/** The structure that `bytes` hold; everything that breaks a rule which needs no other knowledge is refused. */
export function read(name, bytes, limit = LIMITS[name]) {
  return SCHEMAS[name].read(decode(bytes, limit, BIG.includes(name) ? 262144 : 65536))
}

/** The bytes of a structure. */
export const write = (name, value) => encode(SCHEMAS[name].write(value))

function checkRun({ protocol, environments, sampling, model }) { // RUN-3, RUN-4
  must(protocol[0] <= 1 && protocol[1] >= 1, 'unsupported-version')
  must(new Set(environments.map((place) => place.id)).size === environments.length, 'out-of-range')
  must(sampling.stop.every((token) => token < model.vocabulary), 'out-of-range')
  must(sampling.max_tokens <= model.context, 'out-of-range')
}

function checkFiles(files) { // CKP-3, CKP-4, CKP-5
  const lowered = new Set()
  let [before, total] = ['', 0]
  for (const { path, size, chunk, chunks } of files) {
    must(path.length <= 255 && /\.(safetensors|json|jinja|txt)$/.test(path), 'path')
    must(path.split('/').every((part) => /^[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_-])?$/.test(part)), 'path')
    must(before < path && !lowered.has(path.toLowerCase()), 'path')
    lowered.add((before = path).toLowerCase())
    must(chunks.length === 32 * Math.ceil(size / chunk) && (total += size) <= CHECKPOINT, 'size-mismatch')
  }
  const folders = ({ path }) => path.toLowerCase().split('/').slice(0, -1).map((_, i, parts) => parts.slice(0, i + 1).join('/'))
  must(!files.some((file) => folders(file).some((folder) => lowered.has(folder))), 'path')
}

function checkManifest({ version, kind, files, parent, deltas, chain }) {
  must(kind === 'full' || kind === 'delta', 'unknown-kind')
  checkFiles(files)
  must((parent !== undefined) === version > 0) // CKP-8
  if (kind === 'full') return must(deltas === undefined && chain === undefined) // CKP-13, to the end
  must(chain !== undefined && chain.length >= 1 && chain.length <= version)
  must(new Set(chain.map(hex)).size === chain.length && same(chain.at(-1), parent))
  const paths = new Set(files.map(({ path }) => path).filter((path) => path.endsWith('.safetensors')))
  must((deltas ?? []).every(({ path }) => paths.has(path)), 'path')
  checkFiles(deltas ?? [])
}

// --- keys, signatures, compression -----------------------------------------------------------------

const P = 2n ** 255n - 19n, EIGHT = 0x05fc536d880238b13933c6d305acdfd5f098eff289f4c345b027b2c28f95e826n // y of order 8

/** The private key of 32 bytes, and the public key of a private one. */
export const secretOf = (seed) => crypto.createPrivateKey({
  key: Buffer.concat([Buffer.from('302e020100300506032b657004220420', 'hex'), seed]), format: 'der', type: 'pkcs8' })
export const keyOf = (secret) => new Uint8Array(
  Buffer.from(crypto.createPublicKey(secret).export({ format: 'jwk' }).x, 'base64url'))

/** IDN-2 as OpenSSL has it, which alone would take points of small order [IDN-3]. */
export function verify(key, message, signature) {
  const y = BigInt('0x' + hex(key.toReversed())) % 2n ** 255n
  must(y > 1n && y < P - 1n && y !== EIGHT && y !== P - EIGHT, 'bad-signature')
  const point = { key: { kty: 'OKP', crv: 'Ed25519', x: Buffer.from(key).toString('base64url') }, format: 'jwk' }
  must(signature.length === 64 && crypto.verify(null, message, crypto.createPublicKey(point), signature), 'bad-signature')
}

/** IDN-1: base58btc of the identity multihash of the key. */
export function peerIdOf(key) {
  let [number, result] = [BigInt('0x002408011220' + hex(key)), '']
  for (; number > 0n; number /= 58n) result = '123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz'[number % 58n] + result
  return '1' + result // the first byte is 0
}

/** The content of exactly one zstd frame of `size` bytes [ENV-8]. Its header and blocks are looked at before libzstd is.
 * Without `size` it is what the frame says; `check` may refuse that and else returns it [DLT-4]. */
export function unzip(frame, size, check) {
  const data = Buffer.from(frame.buffer, frame.byteOffset, frame.length), [, , , , flags] = data
  const bad = (test) => must(test, 'bad-compression')
  bad(data.length >= 6 && data.readUInt32LE() === 0xfd2fb528)
  const single = flags >> 5 & 1, identity = [0, 1, 2, 4][flags & 3], width = [single, 2, 4, 8][flags >> 6]
  let at = 6 - single + identity + width
  bad(width > 0 && at <= data.length && !data.subarray(6 - single, 6 - single + identity).some((byte) => byte > 0))
  const claim = width === 8 ? data.readBigUInt64LE(at - 8) : data.readUIntLE(at - width, width) + (width === 2 ? 256 : 0)
  size ??= check(Number(claim))
  const window = single ? size : 2 ** (10 + (data[5] >> 3)) * (1 + (data[5] & 7) / 8)
  bad(size >= 1 && claim == size && window <= WINDOW) // == of bigint and number
  for (let last = 0; !last;) {
    bad(at + 3 <= data.length)
    const head = data.readUIntLE(at, 3)
    at += 3 + ((head >> 1 & 3) === 1 ? 1 : head >> 3)
    last = head & 1
  }
  bad(at + (flags & 4) === data.length)
  try {
    const content = zstd.decompress(frame)
    bad(content.length === size)
    return content
  } catch { throw new Refused('bad-compression') }
}
export const zip = (content) => zstd.compress(content)

// --- envelopes -------------------------------------------------------------------------------------

const PREIMAGE = text8('nous/envelope/1')

/** What an envelope says, in the order of GOS-1. `now`: times are checked; `run`, `kind`, `keys`: of this run, one of
 * these kinds, by one of these keys; `known(head, id)` may refuse a replay. `limit`: bytes of the envelope. */
export function openEnvelope(bytes, { now, run, kind = KINDS, keys, known = () => {}, limit = MAX_FETCHED, most } = {}) {
  const { sig, signed } = read('envelope', bytes, limit)
  const value = decode(signed, limit)
  must(value instanceof Map)
  const v = value.get('v')
  must(!whole(v) || v == 1, 'unsupported-version')
  const head = SCHEMAS.signed.read(value), id = sha256(signed), { ts, exp, enc, size, body } = head
  must(KINDS.includes(head.kind), 'unknown-kind')
  must(run === undefined || same(head.run, run), 'wrong-run')
  must(kind.includes(head.kind), 'wrong-kind')
  if (now !== undefined) {
    must(exp > ts && BigInt(exp) - BigInt(ts) <= LIFE, 'lifetime')
    must(ts <= now + SKEW, 'future-dated')
    must(exp > now, 'expired')
  }
  known(head, id)
  must(keys === undefined || keys.some((key) => same(key, head.from)), 'wrong-role')
  verify(head.from, Buffer.concat([PREIMAGE, signed]), sig)
  most ??= head.kind === 'run' || head.kind === 'checkpoint' ? MAX_MANIFEST : MAX_BODY
  must((enc ?? null) === (size == null ? null : 'zstd'), 'bad-compression')
  must((size ?? body.length) <= most, 'oversize')
  return { id, signed, sig, head, value, content: size == null ? body : unzip(body, size) }
}

/** A signed envelope of `body`, compressed where that is smaller. */
export function seal({ kind, run, seq, now, body }, secret) {
  const packed = zip(body), smaller = packed.length < body.length
  const head = { v: 1, kind, run, from: keyOf(secret), seq, ts: now, exp: now + LIFE, body: smaller ? packed : body }
  const signed = write('signed', smaller ? { ...head, enc: 'zstd', size: body.length } : head)
  return write('envelope', { sig: crypto.sign(null, Buffer.concat([PREIMAGE, signed]), secret), signed })
}

/** RUN-1 to RUN-5; without `run`, the run that the envelope names. */
export function openRun(envelope, run) {
  const opened = openEnvelope(envelope, { run, kind: ['run'] }), { head, content } = opened
  must(same(sha256(content), head.run), 'wrong-run')
  const manifest = read('run-manifest', content)
  must(same(manifest.root, head.from), 'wrong-role')
  return { ...opened, run: head.run, manifest }
}

export const filesHash = (files) => sha256(text8('nous/files/1'), encode(files.map(fileEntry.write)))
export const weightsHash = (tensors) => sha256(text8('nous/weights/1'), encode(tensors))

/** CKP-1 to CKP-16. `options` as those of `openEnvelope`: `now` and `known` where it was gossiped. */
export function openCheckpoint(envelope, run, { trainers, base }, options) {
  const opened = openEnvelope(envelope, { run, kind: ['checkpoint'], keys: trainers, ...options })
  const manifest = read('checkpoint-manifest', opened.content)
  must(manifest.version > 0 || same(filesHash(manifest.files), base), 'hash-mismatch')
  return { ...opened, hash: sha256(opened.content), manifest }
}

/** CKP-17: the key that signed two checkpoints of one version, and the version. */
export function openEquivocation(proof, run, manifest) {
  const { first, second } = read('equivocation', proof)
  const [a, b] = [first, second].map((envelope) => openCheckpoint(envelope, run, manifest))
  must(same(a.head.from, b.head.from) && a.manifest.version === b.manifest.version && !same(a.hash, b.hash))
  return { key: a.head.from, version: a.manifest.version }
}

/** RCP-1, RCP-2. */
export function openReceipts(envelope, run, { trainers }, options) {
  const opened = openEnvelope(envelope, { run, kind: ['receipts'], keys: trainers, ...options })
  return { ...opened, ...read('receipts', opened.content) }
}

/** RCP-8, RCP-9: what a proof file proves of its key. */
export function openProof(file) {
  const { sig, signed } = read('proof', file)
  const { key, made, run: envelope, standing: told, receipts } = read('proof-signed', signed)
  verify(key, Buffer.concat([text8('nous/proof/1'), signed]), sig)
  const { run, manifest } = openRun(envelope), mine = ({ peer }) => same(peer, key)
  const standings = told === null ? [null] : (openReceipts(told, run, manifest).standings ?? []).filter(mine)
  must(standings.length === 1, 'out-of-range')
  const ids = new Set(), verdicts = new Map()
  for (const message of receipts) {
    const { id, items } = openReceipts(message, run, manifest)
    must(items.some(mine), 'wrong-role')
    must(ids.size < ids.add(hex(id)).size, 'duplicate')
    for (const item of items.filter(mine)) if (!verdicts.has(hex(item.rollout))) verdicts.set(hex(item.rollout), item)
  }
  return { run, key, made, standing: standings[0], messages: ids.size, verdicts: [...verdicts.values()] }
}

// --- rollouts --------------------------------------------------------------------------------------

const WIDTHS = { u32: 4, f32: 4, f16: 2 }
const halfOf = (bits) => { // IEEE 754 binary16
  const [exponent, fraction] = [bits >> 10 & 31, bits & 1023]
  const size = exponent === 31 ? (fraction ? NaN : Infinity) : exponent ? 2 ** (exponent - 25) * (1024 + fraction) : fraction * 2 ** -24
  return bits >> 15 ? -size : size
}
const bitsOf = (value) => { // the nearest, ties to even: sums of a float and a power of two round so
  const size = Math.abs(value), sign = value < 0 || Object.is(value, -0) ? 0x8000 : 0
  if (Number.isNaN(value) || size >= 65520) return sign | (Number.isNaN(value) ? 0x7e00 : 0x7c00)
  const unit = 2 ** (Math.max(-14, Math.floor(Math.log2(size || 1e-9))) - 10)
  const steps = size / unit + 2 ** 52 - 2 ** 52
  return sign | (unit === 2 ** -24 ? 0 : (Math.log2(unit) + 24) << 10) + steps
}

/** ROL-10: values in byte planes, and back. */
export function planes(values, form) {
  const width = WIDTHS[form], count = values.length
  const flat = form === 'f16' ? Uint16Array.from(values, bitsOf) : (form === 'u32' ? Uint32Array : Float32Array).from(values)
  const raw = new Uint8Array(flat.buffer)
  return Uint8Array.from(raw, (_, i) => raw[i % count * width + Math.floor(i / count)])
}
export function unplanes(bytes, form) {
  const width = WIDTHS[form], count = bytes.length / width
  must(Number.isInteger(count))
  const { buffer } = Uint8Array.from(bytes, (_, i) => bytes[i % width * count + Math.floor(i / width)])
  return form === 'f16' ? Float32Array.from(new Uint16Array(buffer), halfOf) : new (form === 'u32' ? Uint32Array : Float32Array)(buffer)
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
  const spans = []
  let [at, trained] = [0, 0]
  for (const segment of segments) {
    spans.push(tokens.subarray(at, at += segment.length))
    if (segment.trained) trained += segment.length
  }
  must(tokens.length > 0 && at === tokens.length && !segments[0].trained, 'segments')
  must(tokens.length <= model.context && trained <= sampling.max_tokens, 'too-long')
  must(tokens.every((token) => token < model.vocabulary), 'token-range')
  must(arrays.logprobs.length === trained * WIDTHS[sampling.logprobs], 'logprobs')
  const logprobs = unplanes(arrays.logprobs, sampling.logprobs)
  must(logprobs.every(Number.isFinite), 'not-finite')
  must(logprobs.every((value) => value <= 0), 'logprobs')
  must(allowed || (advantage ?? arrays.advantages) === undefined, 'advantages')
  must(advantage === undefined || arrays.advantages === undefined, 'advantages')
  must((arrays.advantages?.length ?? 4 * trained) === 4 * trained, 'advantages')
  const advantages = arrays.advantages ? unplanes(arrays.advantages, 'f32') : [advantage ?? 0]
  must(advantages.every(Number.isFinite), 'not-finite')
  must(advantages.every((value) => Math.abs(value) <= MAGNITUDE), 'out-of-range')
  must(segments.every((segment, i) => !segment.trained || spans[i].subarray(0, -1).every((token) => !stops.has(token))), 'finish')
  const full = trained === sampling.max_tokens || tokens.length === model.context
  const end = segments.at(-1).trained && stops.has(tokens.at(-1)) ? 'stop' : full ? 'length' : 'cut'
  must(finish === end && (end !== 'cut' || trained > 0), 'finish')
  must(parents === undefined || parents.length === segments.length, 'segments')
  must((parents ?? []).every((p, i) => p < i && p >= (segments[i].trained ? 0 : -1)), 'segments')
  must(Math.abs(reward) <= MAGNITUDE, 'out-of-range')
}

/** ROL-14, ROL-15. */
export function readReference(body, { group, model }) {
  const reference = read('reference', body), { size, packed, chunk, chunks } = reference
  must(Math.max(size, packed) <= 65536 + 16 * group * (32 * model.context + 4096), 'oversize')
  must(chunks.length === 32 * Math.ceil(packed / chunk), 'size-mismatch')
  return reference
}

/** ROL-17: the group that stands behind a reference, of its whole frame. */
export function openReferenced(reference, frame) {
  const { size, packed, chunk, chunks } = reference
  must(frame.length === packed, 'size-mismatch')
  for (let i = 0; i * chunk < packed; i++)
    must(same(sha256(frame.subarray(i * chunk, (i + 1) * chunk)), chunks.subarray(32 * i, 32 * i + 32)), 'hash-mismatch')
  const content = unzip(frame, size)
  must(same(sha256(content), reference.hash), 'hash-mismatch')
  const group = read('rollout-group', content)
  must(same(group.checkpoint, reference.checkpoint) && group.counter === reference.counter, 'hash-mismatch')
  return { content, group }
}

// --- streams, invites, topics ----------------------------------------------------------------------

/** STR-1: a structure behind its length. */
export function frame(name, value) {
  const payload = write(name, value), length = Buffer.alloc(4)
  length.writeUInt32BE(payload.length)
  return Buffer.concat([length, payload])
}
export function unframe(name, bytes) {
  must(bytes.length >= 4, 'malformed')
  const length = Buffer.from(bytes.subarray(0, 4)).readUInt32BE()
  must(length <= LIMITS[name], 'oversize')
  must(length <= bytes.length - 4, 'malformed')
  return read(name, bytes.subarray(4, 4 + length))
}

/** STR-3: the chunk in a reply. */
export function openBlob(hash, bytes) {
  const { data, error } = unframe('blob-reply', bytes)
  must(data !== undefined, error === 'busy' ? 'busy' : 'not-found')
  must(same(sha256(data), hash), 'hash-mismatch')
  return data
}

/** STR-4: the numbers of the chunks that a bitmap names, and back. */
export function readBitmap(have, chunks) {
  must(have.length === Math.ceil(chunks / 8), 'size-mismatch')
  const held = Array.from({ length: 8 * have.length }, (_, i) => i).filter((i) => have[i >> 3] >> i % 8 & 1)
  must(held.every((i) => i < chunks), 'size-mismatch')
  return held
}
export function writeBitmap(held, chunks) {
  const have = new Uint8Array(Math.ceil(chunks / 8))
  for (const i of held) have[i >> 3] |= 1 << i % 8
  return have
}

/** INV-1 to INV-4. */
export function readInvite(text) {
  const [, sign] = /^nous1([A-Za-z0-9_-]*)$/.exec(text.replace(/\p{White_Space}/gu, '')) ?? []
  must(sign !== undefined && sign.length <= 2043, 'invite')
  const bytes = Buffer.from(sign, 'base64url'), payload = bytes.subarray(0, -4)
  must(bytes.toString('base64url') === sign && same(sha256(payload).subarray(0, 4), bytes.subarray(-4)), 'invite')
  try { return read('invite', payload, 2048) } catch { throw new Refused('invite') }
}

export const shardOf = (key, shards) => Number(Buffer.from(key).readBigUInt64LE() % BigInt(shards))
export const topics = (run) => {
  const of = (name) => `/nous/1/${hex(run)}/${name}`
  return { rollouts: (shard) => of(`rollouts/${shard}`), checkpoints: of('checkpoints'), receipts: of('receipts') }
}
