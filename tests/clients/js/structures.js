// What is read of others (chapters 02, 03, 05, 07, 09 and 10), with all checks that need no other knowledge.
import { MAX_CONTENT, MAX_MANIFEST, openEnvelope, hex, same, sha256 } from './envelopes.js'
import { Refused, must } from './msgpack.js'
import { bin, dict, hash, int, isMap, key, list, map, name, named, nil, one, pack, real, row, scalar, structure,
  text, uint, whole } from './shapes.js'

const DISK = 2 ** 42, MANIFEST_VALUES = 262144
/** A text of strangers as a person may see it (CNV-1). */
export const printable = (text) => text.replace(/[\p{Cc}\u2028\u2029\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/gu,
  (one) => `\\u${one.charCodeAt().toString(16).padStart(4, '0')}`)

const above = real(Number.MIN_VALUE), share = real(0, 1), error = text(0, 64)
export const address = text(1, 256, /^\/[!-~]*\/p2p\/[1-9A-HJ-NP-Za-km-z]+$/)
const mirror = text(1, 1024, /^https?:\/\/[!-~]+$/)
const dtype = one('float32', 'bfloat16', 'float16'), bound = map({ mean: above, deviation: above, limit: above })
const manifest = (of) => structure(of, MAX_MANIFEST, MANIFEST_VALUES)

// The streams of chapter 03: seconds for an answer, and how many one peer may have open.
export const HEAD = { protocol: '/nous/head/1', seconds: 20, most: 8, request: structure(map({ run: hash }), 1024),
  reply: structure(map({ 'run?': bin(), 'checkpoint?': bin(), 'error?': error }), 32001024) }
export const BLOB = { protocol: '/nous/blob/1', seconds: 60, most: 16, request: structure(map({ hash }), 1024),
  reply: structure(map({ 'data?': bin(), 'error?': error }), 4195328) }
export const HAVE = { protocol: '/nous/have/1', most: 2, request: structure(map({ run: hash, checkpoint: hash,
  'have?': bin(0, 65536), 'http?': int(1, 65535), 'addresses?': list(address, 0, 8) }), 69632) }
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

const readAddresses = structure(map({ addresses: list(address, 1, 16), run: hash }), 2048)
/** INV-1 to INV-4. */
export function readInvite(text) {
  try {
    const [, sign] = /^nous1([A-Za-z0-9_-]{0,2043})$/.exec(text.replace(/\p{White_Space}/gu, ''))
    const bytes = Buffer.from(sign, 'base64url'), payload = bytes.subarray(0, -4)
    must(bytes.toString('base64url') === sign && same(sha256(payload).subarray(0, 4), bytes.subarray(-4)))
    return readAddresses(payload)
  } catch {
    throw new Refused('invite')
  }
}

const environment = map({ id: named, version: named, weight: int(1, 1e6), 'advantages?': one(true, false),
  'config?': dict((value) => (Array.isArray(value) ? list(scalar) : scalar)(value)) })
const runOf = map({ name: named, created: uint, protocol: list(uint, 2, 2), root: key, base: hash,
  trainers: list(key, 1, 64), environments: list(environment, 1, 1024), group: int(2, 1024), staleness: int(0, 8),
  shards: int(1, 65536),
  model: map({ family: named, parameters: uint, bytes: uint, vocabulary: int(1), context: int(1, 1 << 20), dtype }),
  sampling: map({ mode: one('seeded', 'free'), temperature: above, max_tokens: int(1, 1 << 20),
    stop: list(uint, 1, 64), logprobs: one('f32', 'f16') }), 'chat?': name,
  thresholds: map({ logprobs: bound, distances: bound, distance_max: above, tokens: int(1), drift_slack: above,
    drift_limit: above, stop_probability: share, reward: real(0), verifier: dtype, calibrated: named, 'groups?': uint,
    'false_refusals?': share, 'model?': hash }),
  limits: map({ groups_per_second: above, inline_bytes: int(1024) }) }, checkRun)
/** RUN-3 to RUN-5; the protocol is looked at before the shape of all else. */
export const readRun = manifest((value) => {
  const protocol = isMap(value) && value.get('protocol')
  if (Array.isArray(protocol) && protocol.length === 2 && protocol.every(whole))
    must(protocol[0] <= 1 && protocol[1] >= 1, 'unsupported-version')
  return runOf(value)
})
function checkRun({ environments, sampling, model }) {
  must(new Set(environments.map(({ id }) => id)).size === environments.length, 'out-of-range')
  must(sampling.stop.every((token) => token < model.vocabulary) && sampling.max_tokens <= model.context, 'out-of-range')
}

/** The type of a file entry; CKP-3 to CKP-5 are `checkFiles`. */
export const fileEntry = map({ path: text(), size: int(0, DISK), chunk: int(1 << 14, 1 << 22), chunks: bin() })
const PART = /^[A-Za-z0-9_]([A-Za-z0-9._-]*[A-Za-z0-9_-])?$/, ENDS = /\.(safetensors|json|jinja|txt)$/
export function checkFiles(files) {
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
const checkpointOf = map({ version: uint, kind: text(), files: list(fileEntry, 1, 4096), tensors: dict(hash, 1),
  beacon: hash, 'parent?': hash, 'levels?': dict(uint), 'stats?': dict(real()), 'eval?': dict(real()),
  'deltas?': list(fileEntry), 'chain?': list(hash, 0, 64), 'mirrors?': list(mirror, 0, 16) }, checkManifest)
/** CKP-2 to CKP-16 as far as the manifest says it; its kind is looked at before the shape of all else (CKP-6). */
export const readCheckpoint = manifest((value) => {
  const kind = isMap(value) && value.get('kind')
  must(typeof kind !== 'string' || ['full', 'delta'].includes(kind), 'unknown-kind')
  return checkpointOf(value)
})
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
const delta = row({ segment: uint, encoding: one('gap', 'xor', 'full'), size: int(1, 1 << 24) })
export const readDeltaHeader = manifest(map({ tensors: dict(list(delta)) }))

const figure = nil(real()), states = one('probation', 'active', 'throttled', 'quarantine', 'banned')
const readReceipts = structure(map({
  items: list(row({ rollout: hash, peer: key, verdict: one('accepted', 'refused'), code: text(0, 64, /^[a-z0-9-]*$/),
    measured: figure, threshold: figure, credit: uint }), 0, 4096),
  'standings?': list(row({ peer: key, state: states, accepted: uint, refused: uint, credit: uint, debit: uint,
    rank: uint, of: uint, until: uint }), 0, 4096),
  'known?': list(row({ peer: key, version: int(-1) }), 0, 4096) }), MAX_CONTENT)

// What envelopes bring. `options` are those of `openEnvelope`: `now`, `known` and `limit` where it was gossiped.
function open(kind, read, envelope, options) {
  const opened = openEnvelope(envelope, { kind, ...options })
  return { ...opened, hash: sha256(opened.content), manifest: read(opened.content) }
}
/** RUN-1 to RUN-5. */
export function openRun(envelope, run) {
  const opened = open('run', readRun, envelope, { run })
  must(same(opened.hash, run), 'wrong-run')
  must(same(opened.manifest.root, opened.head.from), 'wrong-role')
  return opened
}
/** RCP-1, RCP-2. */
export const openReceipts = (envelope, run, { trainers }, options) =>
  open('receipts', readReceipts, envelope, { run, keys: trainers, ...options })
/** CKP-1 to CKP-16. */
export function openCheckpoint(envelope, run, { trainers, base }, options) {
  const opened = open('checkpoint', readCheckpoint, envelope, { run, keys: trainers, ...options })
  must(opened.manifest.version > 0 || same(filesHash(opened.manifest.files), base), 'hash-mismatch')
  return opened
}
export const filesHash = (files) => sha256('nous/files/1\0', pack(files))
export const shardOf = (key, shards) => Number(Buffer.from(key).readBigUInt64LE() % BigInt(shards))
export const topics = (run) => ({ rollouts: (shard) => `/nous/1/${hex(run)}/rollouts/${shard}`,
  checkpoints: `/nous/1/${hex(run)}/checkpoints`, receipts: `/nous/1/${hex(run)}/receipts` })
