// The adapter of chapter 14: questions as JSON lines on stdin, answers on stdout.
import { readFileSync } from 'node:fs'
import { createInterface } from 'node:readline'
import * as checkpoints from './checkpoints.js'
import { Real, Refused, decode, encode, must } from './msgpack.js'
import * as policy from './policy.js'
import * as structures from './structures.js'

const { hex, read, sha256 } = structures, { sortDigits } = policy, MANY = 262144
const bytes = (value) => typeof value === 'string' ? Buffer.from(value, 'hex')
  : Buffer.concat(value.map(([piece, count]) => Buffer.alloc(piece.length / 2 * count, piece, 'hex')))
const manifestOf = (question) => read('run-manifest', bytes(question.manifest))
const numbers = (list, absent) => list.map((value) => value ?? absent)

function tagged(value) {
  if (value === null || typeof value === 'boolean') return value
  if (typeof value === 'string') return { text: value }
  if (value instanceof Real) return { float: Object.is(value.value, -0) ? '-0.0' : String(value.value) }
  if (value instanceof Uint8Array) return { bin: hex(value) }
  if (value instanceof Map) return { map: [...value].map(([key, item]) => [key, tagged(item)]) }
  return Array.isArray(value) ? { array: value.map(tagged) } : { int: String(value) }
}
const valueOf = (body) => tagged(decode(body, 1 << 27, MANY))

function checkFile(entry, data) {
  must(data.length === entry.size, 'size-mismatch')
  let at = 0
  for (const { hash, length } of checkpoints.chunksOf(entry)) checkpoints.checkChunk(hash, data.subarray(at, at += length))
}

let ours // the default's version 0, of the package that this client is tested with
function ownPolicy() {
  const folder = new URL('../../../trainer/default/', import.meta.url), file = (name) => readFileSync(new URL(name, folder))
  const weights = file('model.safetensors'), tensors = checkpoints.readSafetensors(weights)
  const values = [...tensors.keys()].sort().map((name) => checkpoints.widen(tensors.get(name)))
  return { policy: policy.loadPolicy(weights, JSON.parse(file('config.json'))), weights: hex(sha256(...values.map((one) => new Uint8Array(one.buffer)))) }
}

const OPS = {
  client: () => ({ name: 'nous-volunteer-js', version: '0.1.0' }),
  encoding(q) {
    const value = decode(bytes(q.bytes), q.limit ?? undefined)
    return { value: tagged(value), bytes: hex(encode(value)) }
  },
  identities(q) {
    const key = structures.keyOf(structures.secretOf(bytes(q.seed)))
    return { key: hex(key), peer_id: structures.peerIdOf(key) }
  },
  signatures: (q) => structures.verify(bytes(q.key), bytes(q.message), bytes(q.signature)),
  envelopes(q) {
    const { value, signed, sig, id, content } = structures.openEnvelope(bytes(q.envelope), { now: q.now ?? undefined })
    const preimage = Buffer.concat([Buffer.from('nous/envelope/1\0'), signed])
    return { head: tagged(value), signed: hex(signed), preimage: hex(preimage), sig: hex(sig), id: hex(id), content_sha256: hex(sha256(content)) }
  },
  streams(q) {
    const frame = bytes(q.frame)
    structures.unframe(q.message, frame)
    const value = decode(frame.subarray(4)), body = encode(value)
    return { value: tagged(value), frame: hex(Buffer.concat([frame.subarray(0, 4), body])) }
  },
  bitmaps(q) {
    const held = structures.readBitmap(bytes(q.have), q.chunks)
    return { held, have: hex(structures.writeBitmap(held, q.chunks)) }
  },
  blobs(q) {
    const hash = bytes(q.hash), data = structures.openBlob(hash, bytes(q.reply))
    return { request: hex(structures.frame('blob-request', { hash })), data: hex(data) }
  },
  shards: (q) => ({ shard: structures.shardOf(bytes(q.key), q.shards) }),
  runs(q) {
    const { content, run } = structures.openRun(bytes(q.envelope), bytes(q.run)), of = structures.topics(run)
    const topics = { 'rollouts/0': of.rollouts(0), checkpoints: of.checkpoints, receipts: of.receipts }
    return { manifest: hex(content), value: valueOf(content), topics }
  },
  invites(q) {
    const { run, addresses } = structures.readInvite(q.text)
    return { run: hex(run), addresses }
  },
  tasks(q) {
    const seed = policy.taskSeed(...['run', 'checkpoint', 'beacon', 'key'].map((name) => bytes(q[name])), q.counter)
    const { stream, environment, taskSeed, samplerKeys } = policy.assign(seed, q.weights, q.samples)
    return { seed: hex(seed), stream: hex(stream), environment, task_seed: hex(taskSeed), sampler_keys: samplerKeys.map(hex) }
  },
  uniforms(q) {
    const [key, ...range] = [bytes(q.key), q.start, q.count]
    return { keystream: hex(policy.keystream(key, ...range)), uniforms: [...policy.uniforms(key, ...range)] }
  },
  choices: (q) => policy.choose(numbers(q.logits, -Infinity), q.temperature, q.uniform),
  distances: (q) => policy.distance(numbers(q.logits, -Infinity), q.temperature, q.uniform, q.token),
  arrays(q) {
    const values = structures.unplanes(bytes(q.planes), q.form)
    return { values: [...values], planes: hex(structures.planes(values, q.form)) }
  },
  rollouts(q) {
    structures.readGroup(bytes(q.body), manifestOf(q))
    return { value: valueOf(bytes(q.body)) }
  },
  references(q) {
    structures.readReference(bytes(q.body), manifestOf(q))
    return { value: valueOf(bytes(q.body)) }
  },
  'references-fetched'(q) {
    const reference = structures.readReference(bytes(q.body), manifestOf(q))
    return { value: valueOf(bytes(q.body)), group: hex(structures.openReferenced(reference, bytes(q.frame)).content) }
  },
  limits: (q) => ({ at: policy.limitAt(q, q.tokens, q.reference) }),
  verification(q) {
    const part = (one) => Object.fromEntries(Object.entries(one).map(([name, list]) => [name, numbers(list, NaN)]))
    return policy.verify(manifestOf(q).thresholds, q.trajectories.map(part))
  },
  checkpoints(q) {
    const { content, hash, manifest } = structures.openCheckpoint(bytes(q.envelope), bytes(q.run), manifestOf(q))
    if (q.contents) manifest.files.forEach((entry, i) => checkFile(entry, bytes(q.contents[i])))
    return { manifest: hex(content), value: valueOf(content), hash: hex(hash), files_hash: hex(structures.filesHash(manifest.files)),
      weights_hash: hex(structures.weightsHash(manifest.tensors)) }
  },
  chunks: (q) => ({ data: hex(checkpoints.checkChunk(bytes(q.hash), bytes(q.data))) }),
  trees(q) {
    const entry = read('file-entry', bytes(q.entry), 1 << 27), data = bytes(q.data)
    checkFile(entry, data)
    return { entry: hex(structures.write('file-entry', checkpoints.entryOf(entry.path, data, entry.chunk))) }
  },
  chains: (q) => checkpoints.checkChain(read('checkpoint-manifest', bytes(q.manifest)), q.chain.map(bytes)) && {},
  equivocations(q) {
    const { key, version } = structures.openEquivocation(bytes(q.proof), bytes(q.run), manifestOf(q))
    return { key: hex(key), version: Number(version) }
  },
  deltas(q) {
    const contents = [], hashes = new Map(Object.entries(q.tensors).map(([name, hash]) => [name, bytes(hash)]))
    return { result: hex(checkpoints.applyDelta(bytes(q.parent), bytes(q.delta), hashes, contents)), contents: contents.map(hex) }
  },
  receipts: (q) => ({ body: hex(structures.openReceipts(bytes(q.envelope), bytes(q.run), manifestOf(q)).content) }),
  hellos: (q) => ({ body: hex(encode((read('hello', bytes(q.body)), decode(bytes(q.body))))) }),
  seeds: (q) => ({ small: bytes(q.seed).readUInt32LE() >>> 1 }),
  'sort-digits'(q) {
    const { prompt, solution } = sortDigits.task(bytes(q.seed), q.length, q.level)
    return { prompt, tokens: policy.tokensOf(prompt), solution }
  },
  'sort-digits-score': (q) => ({ reward: sortDigits.score(sortDigits.task(bytes(q.seed), q.length, q.level).solution, q.answer, q.ended) }),
  'sort-digits-text': (q) => ({ text: policy.textOf(q.tokens) }),
  'nous-default'(q) {
    const { weights, policy: own } = ours ??= ownPolicy(), tokens = policy.tokensOf(q.text)
    return { weights, tokens, logits: [...own.start().feed(tokens)] }
  },
}

function answer(line) {
  try {
    const question = JSON.parse(line)
    return Object.hasOwn(OPS, question.op) ? { ok: OPS[question.op](question) ?? {} } : { unsupported: true }
  } catch (error) {
    const { code, measured, threshold } = error instanceof Refused ? error : { code: 'question' }
    if (code === 'question') console.error(error)
    return { error: code, measured, threshold }
  }
}

for await (const line of createInterface({ input: process.stdin })) process.stdout.write(JSON.stringify(answer(line)) + '\n')
