// The adapter of chapter 14: questions as JSON lines on stdin, answers on stdout.
import { readFileSync } from 'node:fs'
import { createInterface } from 'node:readline'
import { applyDelta, checkChain, checkChunk, chunksOf, entryOf, readSafetensors, widen } from './checkpoints.js'
import { Real, Refused, decode, encode, must } from './msgpack.js'
import * as policy from './policy.js'
import * as structures from './structures.js'

const { hex, read, sha256, write } = structures, { sortDigits, tokensOf } = policy
const HEX = ['beacon', 'body', 'bytes', 'checkpoint', 'data', 'delta', 'entry', 'envelope', 'frame', 'hash', 'have', 'key',
  'manifest', 'parent', 'planes', 'proof', 'reply', 'run', 'seed', 'signature']
const bytesOf = (value) => typeof value === 'string' ? Buffer.from(value, 'hex')
  : Buffer.concat(value.map(([piece, count]) => Buffer.alloc(piece.length / 2 * count, piece, 'hex')))
const numbers = (list, absent) => list.map((value) => value ?? absent)
const ofRun = ({ manifest }) => read('run-manifest', manifest)

function tagged(value) {
  if (value === null || typeof value === 'boolean') return value
  if (typeof value === 'string') return { text: value }
  if (value instanceof Real) return { float: Object.is(value.value, -0) ? '-0.0' : String(value.value) }
  if (value instanceof Uint8Array) return { bin: value }
  if (value instanceof Map) return { map: [...value].map(([key, item]) => [key, tagged(item)]) }
  return Array.isArray(value) ? { array: value.map(tagged) } : { int: String(value) }
}
const valueOf = (body) => tagged(decode(body, 1 << 27, 1 << 18)) // with the keys that no structure names

function plain(key) { // `this[key]`, since a buffer says itself what it is in JSON
  const value = this[key]
  if (value instanceof Uint8Array) return hex(value)
  return ArrayBuffer.isView(value) ? [...value] : typeof value === 'bigint' ? Number(value) : value
}

function checkFile(entry, data) {
  must(data.length === entry.size, 'size-mismatch')
  let at = 0
  for (const { hash, length } of chunksOf(entry)) checkChunk(hash, data.subarray(at, at += length), length)
}

let own // the default of the release that this client lies in
function defaultPolicy() {
  const file = (name) => readFileSync(new URL(`../../../trainer/default/${name}`, import.meta.url))
  const weights = file('model.safetensors'), tensors = readSafetensors(weights)
  const values = [...tensors.keys()].sort().map((name) => new Uint8Array(widen(tensors.get(name), tensors.get(name).shape).buffer))
  return { start: policy.loadPolicy(weights, JSON.parse(file('config.json'))).start, weights: sha256(...values) }
}

const OPS = {
  client: () => ({ name: 'nous-volunteer-js', version: '0.1.0' }),
  encoding({ bytes, limit }) {
    const value = decode(bytes, limit ?? undefined)
    return { value: tagged(value), bytes: encode(value) }
  },
  identities({ seed }) {
    const key = structures.keyOf(structures.secretOf(seed))
    return { key, peer_id: structures.peerIdOf(key) }
  },
  signatures: ({ key, message, signature }) => structures.verify(key, bytesOf(message), signature),
  envelopes({ envelope, now }) {
    const { value, content, signed, ...opened } = structures.openEnvelope(envelope, { now: now ?? undefined })
    const preimage = Buffer.concat([Buffer.from('nous/envelope/1\0'), signed])
    return { ...opened, head: tagged(value), signed, preimage, content_sha256: sha256(content) }
  },
  streams({ message, frame }) {
    structures.unframe(message, frame)
    const head = frame.subarray(0, 4), value = decode(frame.subarray(4, 4 + head.readUInt32BE()), 1 << 26)
    return { value: tagged(value), frame: Buffer.concat([head, encode(value)]) }
  },
  bitmaps({ have, chunks }) {
    const held = structures.readBitmap(have, chunks)
    return { held, have: structures.writeBitmap(held, chunks) }
  },
  blobs: ({ hash, reply }) => ({
    request: structures.frame('blob-request', { hash }), data: structures.openBlob(hash, reply) }),
  shards: ({ key, shards }) => ({ shard: structures.shardOf(key, shards) }),
  runs({ envelope, run }) {
    const { content } = structures.openRun(envelope, run), { rollouts, checkpoints, receipts } = structures.topics(run)
    return { manifest: content, value: valueOf(content), topics: { 'rollouts/0': rollouts(0), checkpoints, receipts } }
  },
  invites: ({ text }) => structures.readInvite(text),
  tasks({ run, checkpoint, beacon, key, counter, weights, samples }) {
    const seed = policy.taskSeed(run, checkpoint, beacon, key, counter), drawn = policy.assign(seed, weights, samples)
    return { ...drawn, seed, task_seed: drawn.taskSeed, sampler_keys: drawn.samplerKeys }
  },
  uniforms: ({ key, start, count }) => ({
    keystream: policy.keystream(key, start, count), uniforms: policy.uniforms(key, start, count) }),
  choices: (q) => policy.choose(numbers(q.logits, -Infinity), q.temperature, q.uniform),
  distances: (q) => policy.distance(numbers(q.logits, -Infinity), q.temperature, q.uniform, q.token),
  arrays({ planes, form }) {
    const values = structures.unplanes(planes, form)
    return { values, planes: structures.planes(values, form) }
  },
  rollouts: (q) => structures.readGroup(q.body, ofRun(q)) && { value: valueOf(q.body) },
  references: (q) => structures.readReference(q.body, ofRun(q)) && { value: valueOf(q.body) },
  'references-fetched'(q) {
    const { content } = structures.openReferenced(structures.readReference(q.body, ofRun(q)), q.frame)
    return { value: valueOf(q.body), group: content }
  },
  limits: (q) => ({ at: policy.limitAt(q, q.tokens, q.reference) }),
  verification(q) {
    const part = (one) => Object.fromEntries(Object.entries(one).map(([name, list]) => [name, numbers(list, NaN)]))
    return policy.verify(ofRun(q).thresholds, q.trajectories.map(part))
  },
  checkpoints(q) {
    const { content, hash, manifest } = structures.openCheckpoint(q.envelope, q.run, ofRun(q)), { files, tensors } = manifest
    q.contents?.forEach((data, i) => checkFile(files[i], bytesOf(data)))
    return { manifest: content, value: valueOf(content), hash, files_hash: structures.filesHash(files),
      weights_hash: structures.weightsHash(tensors) }
  },
  chunks: ({ data, hash }) => ({ data: checkChunk(hash, data) }),
  trees({ entry, data }) {
    const file = read('file-entry', entry)
    checkFile(file, data)
    return { entry: write('file-entry', entryOf(file.path, data, file.chunk)) }
  },
  chains: ({ manifest, chain }) => ({ chain: checkChain(read('checkpoint-manifest', manifest), chain.map(bytesOf)).length }),
  equivocations: (q) => structures.openEquivocation(q.proof, q.run, ofRun(q)),
  deltas({ parent, delta, tensors }) {
    const hashes = new Map(Object.entries(tensors).map(([name, hash]) => [name, bytesOf(hash)]))
    return { result: applyDelta(parent, delta, hashes) }
  },
  receipts: (q) => ({ body: structures.openReceipts(q.envelope, q.run, ofRun(q)).content }),
  hellos: ({ body }) => read('hello', body) && { body: encode(decode(body)) },
  seeds: ({ seed }) => ({ small: seed.readUInt32LE() >>> 1 }),
  'sort-digits'({ seed, length, level }) {
    const { prompt, solution } = sortDigits.task(seed, length, level)
    return { prompt, tokens: tokensOf(prompt), solution }
  },
  'sort-digits-score': ({ seed, length, level, answer, ended }) => ({
    reward: sortDigits.score(sortDigits.task(seed, length, level).solution, answer, ended) }),
  'sort-digits-text': ({ tokens }) => ({ text: policy.textOf(tokens) }),
  forward: ({ config, weights, tokens }) => ({
    logits: policy.loadPolicy(bytesOf(weights), config).start().feed(tokens) }),
  'nous-default'({ text }) {
    const { start, weights } = own ??= defaultPolicy()
    return { weights, tokens: tokensOf(text), logits: start().feed(tokensOf(text)) }
  },
}

function answer(line) {
  try {
    const question = JSON.parse(line)
    for (const name of HEX) if (name in question) question[name] = bytesOf(question[name])
    return Object.hasOwn(OPS, question.op) ? { ok: OPS[question.op](question) ?? {} } : { unsupported: true }
  } catch (error) { // another error is a question that is none, or a fault of this client: no answer that passes
    return error instanceof Refused ? { error: error.code, ...error } : { fault: String(error) }
  }
}

for await (const line of createInterface({ input: process.stdin }))
  process.stdout.write(`${JSON.stringify(answer(line), plain)}\n`)
